"""The verifier's side of the link: what the drafter is told, and when it is given up on.

The drafter is expendable. It may be slow, silent, restarted or wrong; the worst that follows is
plain decoding. After two timeouts in a row nothing is sent and nothing is waited for until it
speaks again; since a table can get lost, it is asked once more from time to time.
"""

import time
from collections import Counter
from collections.abc import Mapping

from d3d_ray.decode.protocols import Drafter
from d3d_ray.decode.session import Session
from d3d_ray.metrics import running_mean
from d3d_ray.records import Free, Lost, Outcome, Prefill, Table, ToDrafter

_MAX_TIMEOUTS = 2
_RETRY_NS = 1_000_000_000


class Correspondence:
    """One verifier's exchange with one drafter, over all sessions."""

    def __init__(self, drafter: Drafter | None, *, block_size: int, vocab_size: int) -> None:
        self._drafter = drafter
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._num_timeouts = 0
        self._retry_at_ns = 0
        self._to_free: list[str] = []
        self.dropped: Counter[str] = Counter()
        """Messages that were of no use, by reason."""

    @property
    def is_suspended(self) -> bool:
        return self._drafter is None or self._num_timeouts >= _MAX_TIMEOUTS

    def attach(self, drafter: Drafter | None, sessions: Mapping[str, Session]) -> None:
        """Change to another drafter, which knows nothing yet; None = decode plainly."""
        self._drafter = drafter
        self._num_timeouts = 0
        self._to_free.clear()
        for session in sessions.values():
            session.num_told = None
            session.is_awaiting = False

    def tell(self, session: Session, drafts: tuple[int, ...] | None) -> None:
        """Tell what is committed and what is verified now (None: nothing; drafts are wanted)."""
        session.is_awaiting = False
        now = time.monotonic_ns()
        if self._drafter is None or (self.is_suspended and now < self._retry_at_ns):
            return
        message = self._message(session, drafts)
        sent_ns = time.monotonic_ns()
        if self._drafter.send(message):
            session.num_told = len(session.tokens)
            session.is_awaiting = not self.is_suspended
            session.awaited_epoch = session.epoch if drafts is None else session.epoch + 1
            session.sent_ns = sent_ns
        else:
            self.count_timeout(session)
        if self.is_suspended:
            self._retry_at_ns = now + _RETRY_NS

    def forget(self, session: Session) -> None:
        """Let the drafter free the request, as soon as it listens."""
        if session.num_told is not None:
            self._to_free.append(session.id)
            self._send_frees()

    def _send_frees(self) -> None:
        while self._to_free and self._drafter is not None and not self.is_suspended:
            if not self._drafter.send(Free(self._to_free[-1])):
                return
            self._to_free.pop()

    def count_timeout(self, session: Session) -> None:
        """The table this session waited for did not come in time."""
        session.is_awaiting = False
        self._num_timeouts += 1
        if self._num_timeouts == _MAX_TIMEOUTS:
            self._retry_at_ns = time.monotonic_ns() + _RETRY_NS

    def receive(self, sessions: Mapping[str, Session], timeout: float) -> None:
        """Hand arrived tables to their sessions; waits up to ``timeout`` seconds for the first."""
        if self._drafter is None:
            if timeout > 0:
                time.sleep(timeout)
            return
        for message in self._drafter.poll(timeout):
            self._num_timeouts = 0
            session = sessions.get(message.request)
            if session is None:
                self.dropped["unknown"] += 1
            elif isinstance(message, Lost):
                session.num_told = None
                session.is_awaiting = False
            else:
                self._accept(session, message)
        self._send_frees()

    def _accept(self, session: Session, table: Table) -> None:
        if table.epoch < session.epoch:
            self.dropped["stale"] += 1
        elif session.is_drafting_anew and any(branch.k is not None for branch in table.branches):
            self.dropped["stale"] += 1  # A further pass for all outcomes, of which one is known.
        elif table.epoch > session.epoch + 1 or not self._is_well_formed(table):
            self.dropped["malformed"] += 1
        else:
            turnaround_ns = table.arrived_ns - session.sent_ns
            residence_ns = table.finished_ns - table.received_ns
            session.hop_ns = max(0, (turnaround_ns - residence_ns) // 2)
            if session.is_drafting_anew:
                session.jit_ns = running_mean(session.jit_ns, turnaround_ns)
            session.table = table
            session.is_awaiting &= table.epoch < session.awaited_epoch

    def _is_well_formed(self, table: Table) -> bool:
        return all(
            0 <= (branch.k or 0) < self._block_size
            and len(branch.drafts) < self._block_size
            and all(0 <= token < self._vocab_size for token in branch.drafts)
            for branch in table.branches
        )

    def _message(self, session: Session, drafts: tuple[int, ...] | None) -> ToDrafter:
        if session.num_told is None:
            request = session.request
            return Prefill(
                request=session.id,
                epoch=session.epoch,
                tokens=tuple(session.tokens),
                drafts=drafts,
                prompt_length=len(request.prompt),
                sampling=request.sampling,
                stop_ids=request.stop_ids,
                script=request.script,
            )
        news = tuple(session.tokens[session.num_told :])
        return Outcome(session.id, session.epoch, news, drafts, start=session.num_told)
