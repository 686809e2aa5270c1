"""From the blocks of an answer to pieces of text that a client can be sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from d3d_ray.models.text import IncrementalText
from d3d_ray.records import Chunk, Finish, TokenLogprobs
from d3d_ray.serving.errors import ApiError
from d3d_ray.serving.stops import StopFinder


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one verified block adds to the answer."""

    chunk: Chunk
    text: str
    """Perhaps empty: a character that is not complete, or what may begin a stop string, waits."""
    tokens: tuple[int, ...]
    """Those behind a stop string left out, the one that completes it not."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each of ``tokens``, when they were asked for."""
    finish: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """The stop string, or the id of the stop token."""


class AnswerText:
    """The pieces of one answer; put together they do not depend on how it was cut into blocks.

    Stop strings are looked for token by token, from token ``min_tokens`` on. The text of the stop
    token that ends an answer is left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        *,
        is_stop_included: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._text = IncrementalText(tokenizer)
        self._finder = StopFinder(stops, is_included=is_stop_included)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    def push(self, chunk: Chunk) -> Piece:
        """The next piece; the last one has ``finish``, and the answer is not to be read further.

        Raises :class:`ApiError` when the answer was cancelled.
        """
        if chunk.finish in (Finish.CANCELLED, Finish.ERROR):
            raise ApiError(504 if chunk.finish is Finish.CANCELLED else 500, chunk.error)
        is_stopped = chunk.finish is Finish.STOP
        shown = chunk.tokens[:-1] if is_stopped else chunk.tokens
        text, num_taken = "", len(chunk.tokens)
        for index, token in enumerate(shown):
            self._num_tokens += 1
            text += self._find(self._text.push([token]))
            if self._finder.found is not None:
                num_taken = index + 1
                break
        if chunk.finish is not None and self._finder.found is None:
            text += self._find(self._text.finish()) + self._finder.finish()
        stop_reason: str | int | None = self._finder.found
        if stop_reason is None and is_stopped:
            stop_reason = chunk.tokens[-1]
        finish: Literal["stop", "length"] | None = None
        if stop_reason is not None:
            finish = "stop"
        elif chunk.finish is Finish.LENGTH:
            finish = "length"
        return Piece(
            chunk=chunk,
            text=text,
            tokens=chunk.tokens[:num_taken],
            logprobs=chunk.logprobs[:num_taken],
            finish=finish,
            stop_reason=stop_reason,
        )

    def _find(self, text: str) -> str:
        return text if self._num_tokens < self._min_tokens else self._finder.push(text)
