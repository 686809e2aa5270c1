"""From what a user writes to token ids that the target can take."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from d3d_ray.models.chat import render_chat
from d3d_ray.records import Sampling

_KINDS = "a prompt is a text, a list of token ids, or a list of chat messages"

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages (``role`` and ``content``) for the chat template."""


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, thinking: bool | None = None
) -> tuple[int, ...]:
    """Token ids of a prompt; ``thinking`` as in :func:`d3d_ray.models.chat.render_chat`.

    Raises ``ValueError`` when it is neither of the three kinds.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(_checked(prompt)))
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"{_KINDS}, not {type(prompt).__name__}")
    messages = [part for part in prompt if isinstance(part, dict)]
    if messages and len(messages) == len(prompt):
        _check_messages(messages)
        text = render_chat(tokenizer, messages, thinking=thinking)
        return tuple(tokenizer.encode(_checked(text), add_special_tokens=False))
    ids = [part for part in prompt if isinstance(part, int) and not isinstance(part, bool)]
    if len(ids) != len(prompt):
        raise ValueError(_KINDS)
    return tuple(ids)


def _check_messages(messages: Sequence[dict[str, str]]) -> None:
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a chat message needs role and content, both texts: {message!r:.80}")


def _checked(text: str) -> str:
    """Raise ``ValueError`` on half of a surrogate pair, which tokenizers cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is no valid text: {error}") from error
    return text


def check_tokens(
    tokens: Sequence[int],
    sampling: Sampling,
    stop_ids: frozenset[int],
    vocab_size: int,
    max_positions: int,
) -> None:
    """Raise ``ValueError`` for a prompt or stop tokens that the target cannot take.

    ``stop_ids`` are all that stop this request, the model's own included.
    """
    if not tokens:
        raise ValueError("the prompt is empty: give at least one token")
    for token in (*tokens, *sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary [0, {vocab_size})")
    if sampling.min_tokens and stop_ids.issuperset(range(vocab_size)):
        raise ValueError(
            "every token of the vocabulary stops the answer, and min_tokens is "
            f"{sampling.min_tokens}: set it to 0, or give fewer stop_token_ids"
        )
    if len(tokens) >= max_positions:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens and the context limit is {max_positions}, "
            "answer included: shorten the prompt"
        )
