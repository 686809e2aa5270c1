"""Ways to decode, on the same verifier code; ``dflash`` has a module of its own.

::

    ar     verify | verify | verify | …                      no drafter

    sync   verify |       | verify |       | …               after a round: tell (k, t*), wait
                  | draft |        | draft |                 for drafts behind t*

    async  verify r | verify r+1 | verify r+2 | …            at the start of round r: tell the
           draft for r+1 | draft for r+2 | …                 outcome of r-1 and the block of r;
                                                             after it: take branch k at once

``async`` waits for: the table of the round, while waiting pays. Unblocked by: the table, the
deadline, or a drafter that is given up on.
"""

import time
from typing import Literal

from d3d_ray.decode.correspondence import Correspondence
from d3d_ray.decode.session import Pick, Session
from d3d_ray.records import Mode

_NS_PER_S = 1_000_000_000

MissPolicy = Literal["soft", "jit", "auto"]


class ModePolicy:
    """What a mode does around a verification; nothing, as in ``ar``, unless it says otherwise."""

    def before_round(self, session: Session) -> None:
        """Before the drafts of the next block are picked."""

    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None:
        """Once they are, or once the request is admitted and its prompt is to be run."""

    def after_round(self, session: Session, verify_ns: float) -> None:
        """``verify_ns``: how long a verification takes at present."""

    def asks_again(self, session: Session, pick: Pick) -> bool:
        """Whether the drafter was asked for better drafts than these, which are worth a wait."""
        return False


class Synchronous(ModePolicy):
    def __init__(self, correspondence: Correspondence, *, max_wait_s: float) -> None:
        self._correspondence = correspondence
        self._max_wait_s = max_wait_s

    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None:
        if session.is_prefilling:  # lets the drafter read the prompt meanwhile
            self._correspondence.tell(session, None)

    def after_round(self, session: Session, verify_ns: float) -> None:
        if session.wants_drafts:
            self._correspondence.tell(session, None)
            session.deadline_ns = time.monotonic_ns() + int(self._max_wait_s * _NS_PER_S)


class Asynchronous(ModePolicy):
    """``miss_policy``, when no branch is seeded with t*: ``soft`` takes what there is for k;
    ``jit`` makes one unpacked pass behind t* first; ``auto`` does so where it pays."""

    def __init__(
        self, correspondence: Correspondence, *, max_wait_s: float, miss_policy: MissPolicy
    ) -> None:
        self._correspondence = correspondence
        self._max_wait_s = max_wait_s
        self._miss_policy = miss_policy

    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None:
        if session.wants_drafts:
            self._correspondence.tell(session, drafts)

    def after_round(self, session: Session, verify_ns: float) -> None:
        """Wait while the expected gain in tokens exceeds wait × tokens/s, at most one T_verify."""
        if not session.wants_drafts:
            session.is_awaiting = False
            return
        now = time.monotonic_ns()
        verify_ns = verify_ns or self._max_wait_s * _NS_PER_S  # not measured yet
        gain = max(session.drafted_length - 1.0, 0.0)
        ns_per_token = session.ns_per_token(now) or verify_ns
        wait_ns = min(gain * ns_per_token, verify_ns, self._max_wait_s * _NS_PER_S)
        session.deadline_ns = now + int(wait_ns) if wait_ns >= 1 else 0

    def asks_again(self, session: Session, pick: Pick) -> bool:
        is_missed = pick.kind == "soft" or pick.cause == "no branch"
        if self._miss_policy == "soft" or not is_missed or session.is_drafting_anew:
            return False
        if self._miss_policy == "auto" and not self._pays(session, pick):
            return False
        self._correspondence.tell(session, None)
        session.jit_epoch = session.epoch
        session.deadline_ns = time.monotonic_ns() + int(self._max_wait_s * _NS_PER_S)
        return session.is_awaiting

    def _pays(self, session: Session, pick: Pick) -> bool:
        """(E[tokens | jit] - E[tokens | pick]) ÷ (pass + 2 hops) > tokens/s so far."""
        assert session.table is not None
        lengths, table = session.lengths, session.table
        gain = lengths.get("jit", lengths["hit"]) - lengths[pick.kind]
        pass_ns = (table.finished_ns - table.started_ns) / table.num_passes
        cost_ns = session.jit_ns or pass_ns + 2 * session.hop_ns
        return gain * session.ns_per_token(time.monotonic_ns()) > cost_ns


def make_policies(
    correspondence: Correspondence, *, max_wait_s: float, miss_policy: MissPolicy
) -> dict[Mode, ModePolicy]:
    return {
        Mode.AR: ModePolicy(),
        Mode.SYNC: Synchronous(correspondence, max_wait_s=max_wait_s),
        Mode.ASYNC: Asynchronous(correspondence, max_wait_s=max_wait_s, miss_policy=miss_policy),
    }
