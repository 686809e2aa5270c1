"""Chat messages to the text that the target was trained to answer."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    *,
    thinking: bool | None = None,
) -> str:
    """Up to the start of the answer; ``thinking`` is the template's ``enable_thinking``, if given.

    Raises ``ValueError`` for a tokenizer without a chat template, messages that it refuses, and a
    template without a thinking mode when one is asked for.
    """
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template: use an instruction model")
    if thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError(
            "the target's chat template has no thinking mode to switch: leave --thinking at "
            "default, and target.enable_thinking at null"
        )
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **options
        )
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    assert isinstance(text, str)
    return text
