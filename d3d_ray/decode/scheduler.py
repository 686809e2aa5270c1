"""The decode loop over all requests in flight.

One step serves one session: the next chunk of its prompt, or one round. Among the sessions that
are ready the one served longest ago goes first, so rounds of different requests interleave fairly
and a long prompt does not freeze the others. A session is ready when its table is there, when
waiting for it no longer pays, or when it needs none.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from d3d_ray.decode.budget import KvBudget
from d3d_ray.decode.correspondence import Correspondence
from d3d_ray.decode.dflash import FeatureDrafting
from d3d_ray.decode.gain import Gain, PlainCost
from d3d_ray.decode.logprobs import rate, rate_prompt
from d3d_ray.decode.modes import MissPolicy, make_policies
from d3d_ray.decode.protocols import Block, Drafter, Verifier
from d3d_ray.decode.session import Pick, Session
from d3d_ray.decode.tally import Tally
from d3d_ray.metrics import running_mean
from d3d_ray.records import Chunk, Finish, Mode, Request
from d3d_ray.sampling import NonFiniteLogitsError

logger = logging.getLogger(__name__)


class Scheduler:
    """Decodes many requests on one verifier. ``submit`` and ``cancel`` may come from any thread;
    everything else belongs to the thread that calls ``step``."""

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        *,
        on_chunk: Callable[[Chunk], None],
        block_size: int,
        vocab_size: int,
        prefill_chunk: int = 512,
        max_wait_s: float = 1.0,
        kv_budget_tokens: int = 2**62,
        max_requests: int = 64,
        miss_policy: MissPolicy = "soft",
        is_never_slower: bool = False,
        dflash: FeatureDrafting | None = None,
    ) -> None:
        self._verifier = verifier
        self._on_chunk = on_chunk
        self._prefill_chunk = prefill_chunk
        self._kv_budget = KvBudget(kv_budget_tokens, slack=block_size)
        self._max_requests = max_requests
        self._waiting: deque[Session] = deque()
        self._sessions: dict[str, Session] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self.correspondence = Correspondence(drafter, block_size=block_size, vocab_size=vocab_size)
        self._policies = make_policies(
            self.correspondence, max_wait_s=max_wait_s, miss_policy=miss_policy
        )
        self._num_drafts = dict.fromkeys(self._policies, block_size - 1)
        if dflash is not None:
            self._policies[Mode.DFLASH] = dflash
            self._num_drafts[Mode.DFLASH] = dflash.num_drafts
        self.tally = Tally(max(self._num_drafts.values()))
        self._plain = PlainCost() if is_never_slower else None
        self._verify_ns = 0.0
        self._idle_since_ns = time.monotonic_ns()

    # --- any thread ------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; its chunks go to ``on_chunk``, the last one with a finish reason.

        Raises ``ValueError`` for a mode whose drafter is not there, and when its KV could never
        fit the budget.
        """
        if request.mode not in self._policies:
            raise ValueError(f"mode {request.mode} needs a DFlash drafter: set dflash.source")
        self._kv_budget.check(request)
        session = Session(request, Gain(self._num_drafts[request.mode], self._plain))
        self.run_between_rounds(lambda: self._waiting.append(session))

    def cancel(self, request_id: str) -> None:
        """End a request at its next round; unknown and finished ones are ignored."""
        self.run_between_rounds(lambda: self._cancel(request_id))

    def attach(self, drafter: Drafter | None) -> None:
        """Go on with another drafter (None = plainly), in the middle of answers."""
        self.run_between_rounds(lambda: self.correspondence.attach(drafter, self._sessions))

    @property
    def num_running(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_kv_tokens(self) -> int:
        """What the caches hold, give or take the block that is run at present."""
        # A list made in one go: the loop's thread adds and removes meanwhile.
        return sum(s.num_cached for s in list(self._sessions.values()))

    def run_between_rounds(self, command: Callable[[], None]) -> None:
        """Let the loop's thread run something, which must not raise."""
        self._commands.append(command)
        self._wake.set()

    # --- the loop's thread -----------------------------------------------------------------------

    def step(self, timeout: float) -> None:
        """Serve one session, or wait up to ``timeout`` seconds for something to do."""
        self._obey()
        self._admit()
        if not self._sessions:
            self._rest(timeout)
            return
        self.correspondence.receive(self._sessions, 0.0)
        session, wait_s = self._next_ready()
        if session is None:
            self.correspondence.receive(self._sessions, min(wait_s, timeout))
        elif session.is_prefilling:
            self._prefill(session)
        else:
            self._round(session)

    def fail_all(self, error: str) -> None:
        """End every request with an error; for a loop that cannot go on."""
        self._obey()
        for session in [*self._sessions.values(), *self._waiting]:
            self._end(session, Finish.ERROR, error=error)

    def _obey(self) -> None:
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()

    def _admit(self) -> None:
        reserved = sum(self._kv_budget.reserve(s.request) for s in self._sessions.values())
        while self._waiting and len(self._sessions) < self._max_requests:
            reserved += self._kv_budget.reserve(self._waiting[0].request)
            if reserved > self._kv_budget.num_tokens:
                return
            session = self._waiting.popleft()
            self._sessions[session.id] = session
            self._policies[session.request.mode].before_verify(session, ())

    def _rest(self, timeout: float) -> None:
        self.correspondence.receive(self._sessions, 0.0)
        self._wake.wait(timeout)
        self._idle_since_ns = time.monotonic_ns()

    def _next_ready(self) -> tuple[Session | None, float]:
        """The ready session served longest ago, or None and the seconds until one is due."""
        now = time.monotonic_ns()
        sessions = self._sessions.values()
        ready = [s for s in sessions if not s.is_awaiting or now >= s.deadline_ns]
        if not ready:
            return None, (min(s.deadline_ns for s in sessions) - now) / 1e9
        session = min(ready, key=lambda s: s.last_served_ns)
        return session, 0.0

    def _prefill(self, session: Session) -> None:
        start = time.monotonic_ns()
        block = session.next_chunk(self._prefill_chunk)
        logits = self._forward(session, block)
        if logits is None:
            return
        session.num_prefilled += len(block.tokens)
        self.tally.observe_chunk(len(block.tokens))
        if session.num_prefilled == len(session.request.prompt):
            self._finish_round(session, logits, Pick("prefill"), start)
        else:
            session.last_served_ns = self._idle_since_ns = time.monotonic_ns()

    def _round(self, session: Session) -> None:
        policy = self._policies[session.request.mode]
        policy.before_round(session)
        pick = session.pick()
        if session.is_awaiting and session.deadline_ns:
            self.correspondence.count_timeout(session)
        if policy.asks_again(session, pick):
            return
        start = time.monotonic_ns()
        policy.before_verify(session, pick.drafts)
        logits = self._forward(session, session.next_block(pick.drafts))
        if logits is not None:
            self._finish_round(session, logits, pick, start)

    def _forward(self, session: Session, block: Block) -> torch.Tensor | None:
        try:
            if session.is_prefilling and session.prompt_logprobs:
                session.prompt_logprobs.extend(rate_prompt(self._verifier, session.request, block))
            return self._verifier.forward([block])[0]
        except torch.OutOfMemoryError as error:
            self._end(session, Finish.ERROR, error=f"the verifier ran out of memory: {error}")
            return None

    def _finish_round(
        self, session: Session, logits: torch.Tensor, pick: Pick, start_ns: int
    ) -> None:
        try:
            emitted = session.settle(logits, pick.drafts)
        except NonFiniteLogitsError as error:
            self._end(session, Finish.ERROR, error=str(error))
            return
        logprobs = rate(logits, emitted, session.request.sampling.num_logprobs)
        end_ns = time.monotonic_ns()
        self._verifier.cut(session.id, len(session.tokens) - 1)
        session.record(
            pick,
            num_emitted=len(emitted),
            span_ns=(start_ns, end_ns),
            wait_ns=start_ns - self._idle_since_ns,
        )
        self._idle_since_ns = end_ns
        self.tally.observe(session.rounds[-1])
        chunk = session.chunk(emitted, logprobs)
        if pick.kind != "prefill":
            self._verify_ns = running_mean(self._verify_ns, end_ns - start_ns)
        if session.finish is not None:
            self._end(session, session.finish, chunk=chunk)
            return
        self._policies[session.request.mode].after_round(session, self._verify_ns)
        self._on_chunk(chunk)

    def _cancel(self, request_id: str) -> None:
        for session in [*self._sessions.values(), *self._waiting]:
            if session.id == request_id:
                self._end(session, Finish.CANCELLED)

    def _end(
        self, session: Session, finish: Finish, *, chunk: Chunk | None = None, error: str = ""
    ) -> None:
        if self._sessions.pop(session.id, None) is None:
            self._waiting.remove(session)
        self._verifier.free(session.id)
        self.correspondence.forget(session)
        if error:
            logger.error("request %s ended: %s", session.id, error)
        last = chunk or Chunk(session.id, ())
        self._on_chunk(replace(last, finish=finish, error=error, rounds=tuple(session.rounds)))
