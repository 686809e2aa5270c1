"""Never slower than plain decoding: how many drafts a request may have at present.

::

    full blocks --gain < 1--> half blocks --gain < 1--> none --after a rest--> full blocks
                 far below 1 ------------------------> none

Gain = tokens × cost of a plain step ÷ cost of the rounds that gave them. A plain step's cost is
measured now and then, in a few rounds of which the drafter hears nothing, and while it rests.
"""

import time
from dataclasses import dataclass, field

_WINDOW = 16
"""Rounds over which a gain is measured."""
_NUM_PROBES = 4
_PLAIN_AGE_NS = 60_000_000_000
_FIRST_REST, _LAST_REST = 64, 1024
_POOR_GAIN = 0.8
_WEIGHT = 0.2


@dataclass(slots=True)
class PlainCost:
    """Of one plain step while the drafter rests, over all requests; in ns."""

    ns: float = 0.0
    measured_ns: int = 0

    @property
    def is_known(self) -> bool:
        return self.ns > 0.0 and time.monotonic_ns() - self.measured_ns < _PLAIN_AGE_NS

    def observe(self, cost_ns: int) -> None:
        self.ns += (_WEIGHT if self.is_known else 1.0) * (cost_ns - self.ns)
        self.measured_ns = time.monotonic_ns()


@dataclass(slots=True)
class Gain:
    """Of one request. ``limit`` is what counts; without a plain cost it never changes."""

    num_drafts: int
    """Of a full block."""
    plain: PlainCost | None = None
    """None: the rule is off."""
    limit: int = field(init=False)
    """Drafts a block may have; 0 = the drafter is left alone."""
    _num_left: int = field(init=False, default=_WINDOW)
    _num_rounds: int = field(init=False, default=0)
    _num_tokens: int = field(init=False, default=0)
    _cost_ns: int = field(init=False, default=0)
    _rest: int = field(init=False, default=_FIRST_REST)

    def __post_init__(self) -> None:
        self.limit = self.num_drafts

    def observe(self, num_emitted: int, cost_ns: int) -> None:
        """Take note of a round: its tokens, and the time for verification and waiting."""
        if self.plain is None:
            return
        self._num_rounds += 1
        self._num_tokens += num_emitted
        self._cost_ns += cost_ns
        if self.limit == 0 and self._num_rounds > 1:  # In the first the drafter may be at work.
            self.plain.observe(cost_ns)
        if self._num_rounds >= self._num_left:
            self._judge(self.plain)

    def _judge(self, plain: PlainCost) -> None:
        if self.limit == 0:
            self._start(self.num_drafts, _WINDOW)
            return
        if not plain.is_known:
            self._start(0, _NUM_PROBES)
            return
        gain = self._num_tokens * plain.ns / self._cost_ns
        if gain < 1.0:
            if gain >= _POOR_GAIN and self.limit > 1:
                self._start(self.limit // 2, _WINDOW)
            else:
                self._start(0, self._rest)
                self._rest = min(2 * self._rest, _LAST_REST)
        elif self.limit < self.num_drafts and self._num_left == _WINDOW:
            self._start(self.limit, self._rest)  # Shorter blocks pay: stay for a while.
        else:
            if self.limit == self.num_drafts:
                self._rest = _FIRST_REST
            self._start(self.num_drafts, _WINDOW)

    def _start(self, limit: int, num_rounds: int) -> None:
        self.limit, self._num_left = limit, num_rounds
        self._num_rounds = self._num_tokens = self._cost_ns = 0
