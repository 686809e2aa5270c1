"""The drafter's lives in a running engine: when to start the next one, and with which weights."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from d3d_ray.config import DrafterConfig, EngineConfig
from d3d_ray.models.loading import load_config
from d3d_ray.models.section import SECTION, read_section
from d3d_ray.runtime.actor import ActorInfo
from d3d_ray.runtime.backoff import Backoff
from d3d_ray.runtime.role import Role

logger = logging.getLogger(__name__)

DrafterState = Literal["ready", "starting", "restarting", "failed", "off"]
"""Linked to the verifier; on its first way there; on its way after a failure; given up on after
failures in a row; not asked for."""


class DrafterUpkeep:
    """Spaces the tries to start a drafter, gives up on it, and changes its checkpoint."""

    def __init__(self, role: Role, closing: threading.Event) -> None:
        self._role = role
        self._closing = closing
        self._backoff = Backoff()
        self._revived = threading.Event()
        self._swapping = threading.Lock()
        self.is_given_up = False

    @property
    def is_after_failure(self) -> bool:
        return bool(self._backoff.num_failures or self._role.num_restarts)

    def note_service(self) -> None:
        """It lives; once a table of this life has been sent, what failed before is forgotten."""
        if self._role.num_served:
            self._backoff.succeed()

    def wait_for_next_try(self) -> None:
        """It has failed: returns when another is to be started, or the engine closes."""
        delay_s = self._backoff.fail()
        if delay_s is not None:
            self._closing.wait(delay_s)
            return
        logger.warning(
            "the drafter failed %d times in a row and is given up on; decoding goes on plainly. "
            "Engine.swap_drafter starts another",
            self._backoff.num_failures,
        )
        self._revived.clear()
        self.is_given_up = True
        while not self._closing.is_set() and not self._revived.wait(0.5):
            pass

    def swap(
        self, source: str, *, target: ActorInfo, block_size: int, state: Callable[[], DrafterState]
    ) -> DrafterConfig:
        """Draft with the checkpoint at ``source`` from now on; returns its settings.

        Raises ``ValueError`` when it cannot draft here, and the one before stays; and
        ``RuntimeError`` at a moment when there is no drafter that could be swapped.
        """
        if not self._swapping.acquire(blocking=False):
            raise RuntimeError("another drafter is being loaded: try again when that is done")
        try:
            present = self._role.config
            drafter = settings_of(present, source, block_size)
            config = replace(present, drafter=drafter)
            match state():
                case "failed":
                    self._revive(config, state)
                case "ready":
                    timeout_s = config.runtime.load_timeout_s
                    info = self._role.call("swap", drafter, target, timeout_s=timeout_s)
                    self._role.adopt(info, config)
                case other:
                    raise RuntimeError(f"the drafter is {other}: try again once it is ready")
        finally:
            self._swapping.release()
        return drafter

    def _revive(self, config: EngineConfig, state: Callable[[], DrafterState]) -> None:
        """Start one more after it was given up on; the next has the old settings if that fails."""
        present = self._role.config
        self._role.config = config
        self._backoff.allow_one()
        self.is_given_up = False
        self._revived.set()
        deadline = time.monotonic() + config.runtime.load_timeout_s
        while state() not in ("ready", "failed") and time.monotonic() < deadline:
            self._closing.wait(0.1)
        if state() != "ready":
            self._role.config = present
            raise ValueError(f"{config.drafter.source} did not start either: see the log")


def settings_of(config: EngineConfig, source: str, block_size: int) -> DrafterConfig:
    """The settings of the drafter at ``source``, for an engine whose blocks have ``block_size``.

    A folder of ours says its own mask token and label shift; for a checkpoint that does not, the
    present settings hold. The block size stays: it is that of the verifier's rows. Raises
    ``ValueError`` when that cannot be.
    """
    if not isinstance(source, str) or not source:
        raise ValueError(f"source must be a drafter's folder or hub name, not {source!r}")
    present = config.drafter
    try:
        folder = load_config(source)
        is_ours = getattr(folder, SECTION, None) is not None
        if is_ours:
            present = replace(present, mask_token_id=None, label_shift=None)
        given = None if is_ours else block_size
        section = read_section(folder, source, given, present.mask_token_id, present.label_shift)
    except OSError as error:
        raise ValueError(f"{source} cannot be read, so the drafter stays: {error}") from error
    if section.block_size < block_size:
        raise ValueError(
            f"{source} drafts blocks of {section.block_size} and the engine runs blocks of "
            f"{block_size}, so the drafter stays: start an engine with "
            f"drafter.block_size={section.block_size} for it"
        )
    return replace(present, source=source, num_layers=None, block_size=block_size)
