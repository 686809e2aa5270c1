"""Token ids to text while they come, without ever cutting a character."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16
_MAX_TOKENS_OF_CHARACTER = 4
"""UTF-8 has at most four bytes, and a token at least one."""


class IncrementalText:
    """The text of an answer, piece by piece; special tokens are left out.

    The pieces put together are what the tokenizer makes of all the tokens at once. A push decodes
    the tokens of the piece before and those behind it, so its cost does not grow with the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        self._tokens: list[int] = []
        """The context, then what has not been handed out."""
        self._num_context = 0
        """Tokens of the last piece: some tokenizers drop the space before a first word."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete, perhaps none."""
        self._tokens.extend(token for token in token_ids if token not in self._special)
        if len(self._tokens) == self._num_context:
            return ""
        text = self._decode(self._tokens)
        if not text.endswith(_REPLACEMENT):
            return self._hand_out(len(self._tokens), text)
        # Bytes that will never make a character must not be held back for ever.
        if len(self._tokens) - self._num_context > _MAX_PENDING:
            for num_tokens in range(len(self._tokens) - 1, self._num_context, -1):
                if len(self._tokens) - num_tokens > _MAX_TOKENS_OF_CHARACTER:
                    break
                head = self._decode(self._tokens[:num_tokens])
                if head + self._decode(self._tokens[num_tokens:]) == text:
                    return self._hand_out(num_tokens, head)
        return ""

    def finish(self) -> str:
        """What was held back, with U+FFFD for a character that never came to its end."""
        return self._hand_out(len(self._tokens), self._decode(self._tokens))

    def _hand_out(self, num_tokens: int, text: str) -> str:
        num_sent = len(self._decode(self._tokens[: self._num_context]))
        self._tokens = self._tokens[self._num_context :]
        self._num_context = num_tokens - self._num_context
        return text[num_sent:]

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text
