"""Request bodies: OpenAI's fields, vLLM's additions, and a plain no to what is not supported.

A field that is not known, or known and not supported, is refused by name unless its value changes
nothing: a misspelt ``temperature`` must not go unnoticed.
"""

import difflib
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from d3d_ray.records import MAX_LOGPROBS, Mode, Sampling

MAX_CHOICES = 32
"""Of one request, over all of its prompts."""

_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
    | {"request_id", "parallel_tool_calls", "stream_options", "model"}
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "reasoning_effort": (),
}
"""Fields that would change the answer, with the values at which they do not."""


class Body(BaseModel):
    """Values keep their JSON types: ``"1"`` is no number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise ValueError(f"{name} is not supported: leave it out")
            near = difflib.get_close_matches(name, list(type(self).model_fields), n=1)
            hint = f", did you mean {near[0]}" if near else ""
            raise ValueError(f"{name} is not a field of this request{hint}: leave it out")
        return self


class StreamOptions(Body):
    include_usage: bool = False


class Generation(Body):
    """What chat and text completions have in common."""

    model: str | None = None
    """None = the one that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 = off."""
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    return_token_ids: bool | None = None
    mode: Mode | None = Field(None, strict=False)
    """Ours: how this request is decoded; never changes a token."""
    deadline_s: float | None = Field(None, gt=0)
    """Ours: give up after so many seconds, time in the queue included."""
    return_metrics: bool | None = None
    """Ours: send ``metrics.speculative_decoding`` with the usage."""
    return_round: bool | None = None
    """Ours: send with each streamed chunk how its block was made."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if any(not stop for stop in self.stops):
            raise ValueError("stop: a stop string must not be empty")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.return_round and not self.stream:
            raise ValueError("return_round needs stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """Longest answer in tokens; None = what the context leaves."""
        return self.max_tokens

    def sampling(self) -> Sampling:
        """Raises ``ValueError`` on a value out of range."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            max_tokens=self.limit,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            num_logprobs=self.num_logprobs,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str = Field(min_length=1)
    content: str | list[TextPart]
    name: str | None = None

    def as_dict(self) -> dict[str, str]:
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content}


class ChatTemplateKwargs(Body):
    enable_thinking: bool | None = None


class ChatRequest(Generation):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: ChatTemplateKwargs | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinking(self) -> bool | None:
        kwargs = self.chat_template_kwargs
        return None if kwargs is None else kwargs.enable_thinking


class CompletionRequest(Generation):
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        num_prompts = len(self.prompts)
        if not 0 < num_prompts * self.num_choices <= MAX_CHOICES:
            raise ValueError(
                f"prompt: {num_prompts} prompts times n={self.num_choices} must be 1 to "
                f"{MAX_CHOICES} answers: send several requests"
            )
        if self.echo and self.stops:
            raise ValueError("echo together with stop is not supported: leave one of them out")
        return self

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_ids = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if is_ids else self.prompt  # type: ignore[list-item,return-value]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    chat_template_kwargs: ChatTemplateKwargs | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


class DrafterRequest(Body):
    source: str = Field(min_length=1)
    """A folder below the configured one."""


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
