"""What crosses a process boundary: small frozen records of plain Python values.

Words (the same everywhere in the package):

- anchor: the newest committed token; not yet in any KV cache.
- block: ``[anchor, d_1 … d_m]``, the input of one verification.
- outcome ``(k, t*)``: the number of accepted drafts, and the target's own token behind them.
- epoch: the number of a round within its request. The prefill of the prompt is round 0.
- branch k: the drafts of the next block for the case that k drafts are accepted.
- table: all branches known for the outcomes of one round.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

MAX_LOGPROBS = 20


class Mode(StrEnum):
    """How a request is decoded; the verifier's code is the same in all of them."""

    AR = "ar"
    SYNC = "sync"
    ASYNC = "async"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target draws its tokens. Raises ``ValueError`` on a value out of range.

    The order of processing is: repetition penalty, presence and frequency penalties,
    ``min_tokens``, temperature, top-k, top-p.
    """

    temperature: float = 0.0
    """0 = argmax, the lowest id on ties."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 = off."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this mass; 1 = off."""
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 = off."""
    presence_penalty: float = 0.0
    """Over the output; 0 = off."""
    frequency_penalty: float = 0.0
    """Over the output, times the count; 0 = off."""
    max_tokens: int | None = None
    """None = up to the context limit."""
    min_tokens: int = 0
    """No stop token is drawn before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens besides the model's own."""
    ignore_eos: bool = False
    """The model's own stop tokens do not stop; ``stop_token_ids`` still do."""
    seed: int | None = None
    """None = drawn afresh for every request."""
    choice: int = 0
    """Index of the answer among several under one seed."""
    num_logprobs: int | None = None
    """Tell of each token its log-probability and so many of the likeliest; None = nothing."""
    num_prompt_logprobs: int | None = None
    """The same of the prompt's tokens. Neither changes a token."""

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, low=0.0, high=100.0)
        _require_number("top_p", self.top_p, low=0.0, high=1.0, is_low_open=True)
        _require_number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _require_number("presence_penalty", self.presence_penalty, low=-100.0, high=100.0)
        _require_number("frequency_penalty", self.frequency_penalty, low=-100.0, high=100.0)
        _require_integer("top_k", self.top_k, low=0)
        _require_integer("min_tokens", self.min_tokens, low=0)
        _require_integer("choice", self.choice, low=0)
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        if self.max_tokens is not None:
            _require_integer("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}: "
                    "ask for no more than max_tokens"
                )
        if self.seed is not None:
            _require_integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"stop_token_ids must be a tuple of ids, not {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            _require_integer("stop_token_ids", token, low=0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _require_number(
    name: str,
    value: float,
    *,
    low: float,
    high: float = math.inf,
    is_low_open: bool = False,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value:
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if value < low or value > high or (is_low_open and value == low):
        bracket = "(" if is_low_open else "["
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value!r}")


def _require_integer(name: str, value: int, *, low: int, high: int = 2**63 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt to be answered; ``sampling.seed`` is set, ``stop_ids`` hold every id that stops."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int
    mode: Mode = Mode.ASYNC
    script: tuple[int, ...] = ()
    """The known answer, for simulated acceptance only; empty in real runs."""


# --- verifier -> drafter -------------------------------------------------------------------------
# Without slots: those of a frozen dataclass pickle through Python code, several times slower.


@dataclass(frozen=True)
class Prefill:
    """A request's whole committed state: opens it, or brings a drafter up to date again.

    ``drafts`` are under verification now (perhaps none); ``None`` means that nothing is, and that
    drafts behind the last token are wanted. The answering table has epoch ``epoch + 1``, or
    ``epoch`` when ``drafts`` is ``None``.
    """

    request: str
    epoch: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...] | None
    prompt_length: int
    sampling: Sampling
    stop_ids: frozenset[int] = frozenset()
    script: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What was committed up to round ``epoch``, and what is verified next.

    ``tokens`` are those behind the first ``start`` committed ones: the accepted drafts and t* of
    the round, or of several rounds when the drafter was not told of each. ``drafts`` as in
    :class:`Prefill`.
    """

    request: str
    epoch: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...] | None
    start: int


@dataclass(frozen=True)
class Free:
    """The request has ended; forget it."""

    request: str


ToDrafter = Prefill | Outcome | Free


# --- drafter -> verifier -------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """Drafts that follow the outcome ``(k, guess)``; ``guess is None`` fits whatever t* is.

    ``k is None``: the outcome was known, and ``guess`` is its t*.
    """

    k: int | None
    guess: int | None
    drafts: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """All branches for the outcomes of round ``epoch``; a newer one replaces it whole.

    Times are the drafter's monotonic clock in ns; ``arrived_ns`` is the verifier's.
    """

    request: str
    epoch: int
    branches: tuple[Branch, ...]
    received_ns: int = 0
    """When the message arrived that this table answers."""
    started_ns: int = 0
    finished_ns: int = 0
    num_passes: int = 1
    num_rows: int = 0
    """Rows of the last pass, clean and masked."""
    arrived_ns: int = 0


@dataclass(frozen=True)
class Lost:
    """The drafter does not know this request's state (restart, gap); it needs a Prefill."""

    request: str


FromDrafter = Table | Lost


# --- towards the user ----------------------------------------------------------------------------
# Without slots, as above: one of these goes out a round.


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target thought of one token: log-softmax of its raw logits, in fp32.

    Raw: before penalties, ``min_tokens``, temperature, top-k and top-p. They do not depend on the
    mode, and are the same bits in each where the rows are fixed (``target.fixed_rows``).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest ids and their log-probabilities, best first, the lower id first on ties."""


@dataclass(frozen=True)
class Chunk:
    """Tokens committed by one round, in order, and in the last chunk the reason of the end."""

    request: str
    tokens: tuple[int, ...]
    kind: str = "none"
    """Outcome kind of the round, or ``prefill``."""
    num_accepted: int = 0
    """The first ``num_accepted`` tokens are accepted drafts, the rest is the target's own."""
    finish: Finish | None = None
    error: str = ""
    rounds: tuple["Round", ...] = ()
    """Every round of the request, in the last chunk only."""
    round: "Round | None" = None
    """The round that gave these tokens; None in a chunk that only ends the answer."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``tokens``, when ``sampling.num_logprobs`` asks for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """In the prefill's chunk, one for each token of the prompt; None for the first."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One verification, as measured. Times in ns of the verifier's monotonic clock."""

    request: str
    epoch: int
    kind: str
    """hit: seeded with t*; soft: another branch for k; jit: made when t* was known, after a miss;
    none: a plain step; or prefill."""
    cause: str = ""
    """Why there were no drafts."""
    num_drafts: int
    num_accepted: int
    num_emitted: int
    """Accepted drafts + 1, less the tokens cut off by a stop or a limit."""
    is_prefill: bool = False
    verify_start_ns: int
    verify_end_ns: int
    wait_ns: int = 0
    """How long the verifier stood idle before this round."""
    draft_start_ns: int = 0
    draft_end_ns: int = 0
    """Span of the drafting that gave this round's drafts, in the drafter's clock; 0 = none."""
    num_passes: int = 0
    num_draft_rows: int = 0
    hop_ns: int = 0
    """Half of the turnaround that was not spent in the drafter; 0 = not measured."""
