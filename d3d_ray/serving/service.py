"""What the routes ask of the engine: prompts checked, and answers in pieces."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

from d3d_ray.records import Sampling
from d3d_ray.runtime.engine import Engine
from d3d_ray.runtime.prompts import encode
from d3d_ray.serving.errors import ApiError
from d3d_ray.serving.pieces import AnswerText, Piece
from d3d_ray.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Message,
    TokenizeRequest,
)

Tokens = tuple[int, ...]


class Service:
    """One engine behind HTTP; ``deadline_s`` holds for requests that set none."""

    def __init__(self, engine: Engine, *, deadline_s: float | None = None) -> None:
        self.engine = engine
        self._deadline_s = deadline_s

    @property
    def model(self) -> str:
        return self.engine.config.name

    @property
    def max_positions(self) -> int:
        return self.engine.supervisor.verifier_info.max_positions

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            raise ApiError(404, f"there is no model {name!r} here: it is {self.model!r}")

    def encode(
        self, request: ChatRequest | CompletionRequest | TokenizeRequest
    ) -> Sequence[Tokens]:
        """The prompts as token ids. Raises ``ValueError`` when the target cannot take one."""
        tokenizer = self.engine.tokenizer
        if isinstance(request, CompletionRequest):
            return [encode(tokenizer, prompt) for prompt in request.prompts]
        if isinstance(request, TokenizeRequest):
            if request.prompt is not None:
                return [encode(tokenizer, request.prompt)]
            kwargs = request.chat_template_kwargs
            thinking = None if kwargs is None else kwargs.enable_thinking
        else:
            thinking = request.thinking
        return [self._encode_chat(request.messages or (), thinking)]

    def _encode_chat(self, messages: Sequence[Message], thinking: bool | None) -> Tokens:
        if thinking is None:
            thinking = self.engine.config.target.enable_thinking
        texts = [message.as_dict() for message in messages]
        return encode(self.engine.tokenizer, texts, thinking=thinking)

    def answer(
        self, request: Generation, prompts: Sequence[Tokens]
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all choices as they are made, each with its index: prompt × n + choice.

        Raises ``ValueError`` before anything is decoded when a prompt or setting is bad.
        """
        sampling = request.sampling()
        for prompt in prompts:
            self.engine.request(prompt, sampling, mode=request.mode)
        return merge(
            [
                self._pieces(request, prompt, replace(sampling, choice=choice))
                for prompt in prompts
                for choice in range(request.num_choices)
            ]
        )

    async def _pieces(
        self, request: Generation, prompt: Tokens, sampling: Sampling
    ) -> AsyncGenerator[Piece, None]:
        text = AnswerText(
            self.engine.tokenizer,
            request.stops,
            is_stop_included=request.include_stop_str_in_output,
            min_tokens=request.min_tokens,
        )
        deadline_s = request.deadline_s or self._deadline_s
        chunks = self.engine.stream(prompt, sampling, mode=request.mode, deadline_s=deadline_s)
        assert isinstance(chunks, AsyncGenerator)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                piece = text.push(chunk)
                yield piece
                if piece.finish is not None:
                    return


async def merge(
    streams: Sequence[AsyncGenerator[Piece, None]],
) -> AsyncGenerator[tuple[int, Piece], None]:
    """Items of all streams as they come. Ends all of them when one fails or the reader leaves."""
    # One item each: a reader that is slow holds the streams up, not the memory.
    queue: asyncio.Queue[tuple[int, Piece | None, Exception | None]] = asyncio.Queue(len(streams))

    async def feed(index: int, stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    await queue.put((index, piece, None))
            await queue.put((index, None, None))
        except Exception as error:
            await queue.put((index, None, error))

    tasks = [asyncio.create_task(feed(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_left = len(tasks)
        while num_left:
            index, piece, error = await queue.get()
            if error is not None:
                raise error
            if piece is None:
                num_left -= 1
            else:
                yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather(pieces: AsyncIterator[tuple[int, Piece]], num_choices: int) -> list[list[Piece]]:
    """All pieces of each choice."""
    gathered: list[list[Piece]] = [[] for _ in range(num_choices)]
    async for index, piece in pieces:
        gathered[index].append(piece)
    return gathered
