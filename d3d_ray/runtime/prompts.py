"""From what a user writes to token ids that the target can take."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from d3d_ray.records import Sampling

_KINDS = "a prompt is a text, a list of token ids, or a list of chat messages"

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages (``role`` and ``content``) for the chat template."""


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt. Raises ``ValueError`` when it is neither of the three kinds."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(_checked(prompt)))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"{_KINDS}, not {type(prompt).__name__}")
    messages = [part for part in prompt if isinstance(part, dict)]
    if messages and len(messages) == len(prompt):
        text = _apply_template(tokenizer, messages)
        return tuple(tokenizer.encode(_checked(text), add_special_tokens=False))
    ids = [part for part in prompt if isinstance(part, int) and not isinstance(part, bool)]
    if len(ids) != len(prompt):
        raise ValueError(_KINDS)
    return tuple(ids)


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a chat message needs role and content, both texts: {message!r:.80}")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    assert isinstance(text, str)
    return text


def _checked(text: str) -> str:
    """Raise ``ValueError`` on half of a surrogate pair, which tokenizers cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no valid text: {error}") from error
    return text


def check_tokens(
    tokens: Sequence[int], sampling: Sampling, vocab_size: int, max_positions: int
) -> None:
    """Raise ``ValueError`` for a prompt or a stop token that the target cannot take."""
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token")
    for token in (*tokens, *sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary [0, {vocab_size})")
    if len(tokens) >= max_positions:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens and the context limit is {max_positions}, "
            "answer included: shorten the prompt"
        )
