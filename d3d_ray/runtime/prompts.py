"""From what a user writes to token ids that the target can take."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from d3d_ray.records import Sampling

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages (``role`` and ``content``) for the chat template."""


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt. Raises ``ValueError`` when it is neither of the three kinds."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    messages = [part for part in prompt if isinstance(part, dict)]
    if messages and len(messages) == len(prompt):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    ids = [part for part in prompt if isinstance(part, int) and not isinstance(part, bool)]
    if len(ids) != len(prompt):
        raise ValueError("a prompt is a text, a list of token ids, or a list of chat messages")
    return tuple(ids)


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
