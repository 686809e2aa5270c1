"""Three ways to decode, on the same verifier code.

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
from typing import Protocol

from d3d_ray.decode.correspondence import Correspondence
from d3d_ray.decode.session import Session
from d3d_ray.records import Mode

_NS_PER_S = 1_000_000_000


class ModePolicy(Protocol):
    """What a mode does around a verification."""

    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None: ...

    def after_round(self, session: Session, verify_ns: float) -> None:
        """``verify_ns``: how long a verification takes at present."""
        ...


class Autoregressive:
    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None:
        pass

    def after_round(self, session: Session, verify_ns: float) -> None:
        pass


class Synchronous:
    def __init__(self, correspondence: Correspondence, *, max_wait_s: float) -> None:
        self._correspondence = correspondence
        self._max_wait_s = max_wait_s

    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None:
        if session.is_prefilling:  # lets the drafter read the prompt meanwhile
            self._correspondence.tell(session, None)

    def after_round(self, session: Session, verify_ns: float) -> None:
        if session.num_left > 1:
            self._correspondence.tell(session, None)
            session.deadline_ns = time.monotonic_ns() + int(self._max_wait_s * _NS_PER_S)


class Asynchronous:
    def __init__(self, correspondence: Correspondence, *, max_wait_s: float) -> None:
        self._correspondence = correspondence
        self._max_wait_s = max_wait_s

    def before_verify(self, session: Session, drafts: tuple[int, ...]) -> None:
        if session.num_left > 1:
            self._correspondence.tell(session, drafts)

    def after_round(self, session: Session, verify_ns: float) -> None:
        """Wait while the expected gain in tokens exceeds wait × tokens/s, at most one T_verify."""
        now = time.monotonic_ns()
        verify_ns = verify_ns or self._max_wait_s * _NS_PER_S  # not measured yet
        num_decoded = session.num_output - 1
        ns_per_token = verify_ns
        if num_decoded:
            ns_per_token = (now - session.decoding_since_ns) / num_decoded
        gain = max(session.drafted_length - 1.0, 0.0)
        wait_ns = min(gain * ns_per_token, verify_ns, self._max_wait_s * _NS_PER_S)
        session.deadline_ns = now + int(wait_ns) if wait_ns >= 1 else 0


def make_policies(correspondence: Correspondence, *, max_wait_s: float) -> dict[Mode, ModePolicy]:
    return {
        Mode.AR: Autoregressive(),
        Mode.SYNC: Synchronous(correspondence, max_wait_s=max_wait_s),
        Mode.ASYNC: Asynchronous(correspondence, max_wait_s=max_wait_s),
    }
