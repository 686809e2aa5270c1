"""The drafter's side of the link: a latest-wins slot a request, and drafting for the newest.

Two threads meet here: one drains the link into ``receive`` and never waits for a pass; one calls
``step``, which drafts for the slot that has waited longest. What a newer message makes stale is
never drafted for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from d3d_ray.decode.plans import DraftPlan, Work
from d3d_ray.metrics import running_mean
from d3d_ray.records import Free, FromDrafter, Lost, Outcome, Prefill, Table, ToDrafter


class DraftWorker:
    """Turns messages of the verifier into tables, which go to ``send`` as they are made."""

    def __init__(
        self, plan: DraftPlan, send: Callable[[FromDrafter], bool], *, is_paced: bool = True
    ) -> None:
        self._plan = plan
        self._drafting = threading.Lock()
        self._is_paced = is_paced
        self._send = send
        self._slots: dict[str, Work] = {}
        self._queue: deque[str] = deque()
        """Requests whose work nobody has drafted for yet."""
        self._ended: deque[str] = deque()
        self._condition = threading.Condition()
        self._further_pass_ns = 0.0
        self.num_passes = 0
        self.num_sent = 0
        self.num_unsent = 0

    # --- the link's thread -----------------------------------------------------------------------

    def receive(self, message: ToDrafter) -> None:
        """Merge a message into its slot; asks for a Prefill when it does not fit."""
        received_ns = time.monotonic_ns()
        with self._condition:
            if isinstance(message, Free):
                if self._slots.pop(message.request, None) is not None:
                    self._ended.append(message.request)
                    self._condition.notify()
                return
            work = self._merge(message, received_ns)
            if work is not None:
                self._slots[message.request] = work
                if message.request not in self._queue:
                    self._queue.append(message.request)
                self._condition.notify()
                return
        self._send(Lost(message.request))

    def reset(self) -> None:
        """Forget every request."""
        with self._condition:
            self._ended.extend(self._slots)
            self._slots.clear()
            self._queue.clear()

    def use(self, plan: DraftPlan) -> None:
        """Draft by another plan, in the middle of answers; returns when the last one is at rest."""
        with self._drafting:
            self._plan = plan

    def _merge(self, message: Prefill | Outcome, received_ns: int) -> Work | None:
        if isinstance(message, Prefill):
            return Work(
                request=message.request,
                epoch=_table_epoch(message),
                tokens=message.tokens,
                drafts=message.drafts,
                prompt_length=message.prompt_length,
                sampling=message.sampling,
                stop_ids=message.stop_ids,
                script=message.script,
                received_ns=received_ns,
            )
        work = self._slots.get(message.request)
        if work is None or len(work.tokens) != message.start:
            return None
        return replace(
            work,
            epoch=_table_epoch(message),
            tokens=work.tokens + message.tokens,
            drafts=message.drafts,
            received_ns=received_ns,
            round_ns=_round_ns(work, message, received_ns),
        )

    # --- the drafting thread ---------------------------------------------------------------------

    def step(self, timeout: float) -> bool:
        """Draft for one request; False when there was nothing to do for ``timeout`` seconds."""
        with self._condition:
            if not self._queue and not self._ended:
                self._condition.wait(timeout)
            ended, self._ended = self._ended, deque()
            work = self._take()
        with self._drafting:
            for request in ended:
                self._plan.free(request)
            if work is not None:
                self._draft(work)
        return work is not None or bool(ended)

    def _draft(self, work: Work) -> None:
        started_ns = pass_started_ns = time.monotonic_ns()
        num_passes = 0
        for offer in self._plan.passes(work):
            is_further = num_passes > 0
            num_passes += offer.num_passes
            self.num_passes += offer.num_passes
            finished_ns = time.monotonic_ns()
            table = Table(
                request=work.request,
                epoch=work.epoch,
                branches=offer.branches,
                received_ns=work.received_ns,
                started_ns=started_ns,
                finished_ns=finished_ns,
                num_passes=num_passes,
                num_rows=offer.num_rows,
            )
            if self._send(table):
                self.num_sent += 1
            else:
                self.num_unsent += 1
            if is_further:
                pass_ns = finished_ns - pass_started_ns
                self._further_pass_ns = running_mean(self._further_pass_ns, pass_ns)
            pass_started_ns = time.monotonic_ns()
            if not self._has_time(work, pass_started_ns):
                break

    def _take(self) -> Work | None:
        while self._queue:
            work = self._slots.get(self._queue.popleft())
            if work is not None:  # None: freed meanwhile
                return work
        return None

    def _has_time(self, work: Work, now_ns: int) -> bool:
        """For one more pass: the work is not stale, and will not be when that pass ends."""
        with self._condition:
            if self._slots.get(work.request) is not work or self._queue:
                return False
        if not self._is_paced or not work.round_ns:
            return True
        return now_ns + self._further_pass_ns <= work.received_ns + work.round_ns


def _round_ns(work: Work, message: Outcome, received_ns: int) -> float:
    """Running mean of the time between the starts of two verifications in a row."""
    is_next = message.epoch == work.epoch  # Not behind a rest, or a time without messages.
    if work.drafts is None or message.drafts is None or not is_next:
        return work.round_ns
    return running_mean(work.round_ns, received_ns - work.received_ns)


def _table_epoch(message: Prefill | Outcome) -> int:
    return message.epoch if message.drafts is None else message.epoch + 1
