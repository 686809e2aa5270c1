"""Starts the two actors, links them, watches them, and replaces the one that dies.

Two watching threads, one an actor. Each waits for: the reference that breaks when its actor dies
(at most a second at a time), and the answers to its pings. A dead drafter is replaced while the
verifier decodes on plainly, each time after a longer wait, until it is given up on; a dead
verifier takes its requests with it, and is replaced. Neither thread needs the other's actor to be
alive: the drafter's thread links the pair once both are up.
"""

import contextlib
import logging
import threading
from typing import Any

import ray
from ray.exceptions import RayError

from d3d_ray.config import DrafterConfig, EngineConfig
from d3d_ray.runtime.actor import ActorInfo
from d3d_ray.runtime.channel import has_channels
from d3d_ray.runtime.drafter_actor import DrafterActor
from d3d_ray.runtime.placement import Placement, check_devices
from d3d_ray.runtime.role import Role
from d3d_ray.runtime.upkeep import DrafterState, DrafterUpkeep
from d3d_ray.runtime.verifier_actor import VerifierActor

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_RETRY_S = 5.0


class Supervisor:
    """Owns both actor handles; other threads ask it for the verifier of the moment."""

    def __init__(self, config: EngineConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._verifier = Role("verifier", config, placement, VerifierActor)
        self._drafter = Role("drafter", config, placement, DrafterActor)
        self._has_drafter = config.has_drafter_actor
        self._linked: tuple[Any, Any] | None = None
        self._block_size = config.drafter.block_size or 1
        self._is_ready = threading.Event()
        self._closing = threading.Event()
        self._upkeep = DrafterUpkeep(self._drafter, self._closing)
        self._threads: list[threading.Thread] = []
        self.transport = "none"

    def start(self) -> None:
        """Load both models and link them.

        Raises ``ValueError`` when the pair cannot work, ``TimeoutError`` when loading takes too
        long, and what a model's loading raised.
        """
        roles = [self._verifier, *([self._drafter] if self._has_drafter else [])]
        for role in roles:
            role.create()
        for role in roles:
            role.wait_until_loaded()
        if self._has_drafter:
            check_devices(
                self._verifier.info.device, self._drafter.info.device, self._config.runtime
            )
            self._drafter.call("check_pair", self._verifier.info)
            self._block_size = self._drafter.info.block_size
        self._start_verifier()
        if self._has_drafter:
            self._link()
        for role in roles:
            thread = threading.Thread(target=self._watch, args=[role], daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._closing.set()
        self._is_ready.set()  # Whoever waits for a verifier is told that there will be none.
        for role in (self._verifier, self._drafter):
            role.close()
        for thread in self._threads:
            thread.join()

    def verifier(self, timeout_s: float | None = None) -> Any:
        """The verifier's handle; waits for a new one while it is being replaced.

        Raises ``TimeoutError`` when that takes longer than ``timeout_s`` (None =
        ``runtime.load_timeout_s``), and ``RuntimeError`` once :meth:`close` was called.
        """
        if timeout_s is None:
            timeout_s = self._config.runtime.load_timeout_s
        if not self._is_ready.wait(timeout_s):
            raise TimeoutError(f"no verifier came up within {timeout_s:g} s: see the log")
        if self._closing.is_set():
            raise RuntimeError("the engine is closed: start another")
        return self._verifier.actor

    def report_loss(self, verifier: Any) -> None:
        """A caller found this verifier dead or cut off; the next ones wait for another."""
        if verifier is self._verifier.actor and not self._closing.is_set():
            self._is_ready.clear()
            ray.kill(verifier)  # One that is only cut off would not be replaced.

    def drafter(self) -> Any | None:
        """The drafter's handle; may be dead. None when there is none."""
        return self._drafter.actor if self._has_drafter else None

    @property
    def drafter_state(self) -> DrafterState:
        if not self._has_drafter:
            return "off"
        if self._upkeep.is_given_up:
            return "failed"
        if self._linked == (self._verifier.actor, self._drafter.actor):
            return "ready"
        return "restarting" if self._upkeep.is_after_failure else "starting"

    @property
    def num_restarts(self) -> dict[str, int]:
        return {role.name: role.num_restarts for role in (self._verifier, self._drafter)}

    @property
    def actors(self) -> dict[str, Any]:
        """Both handles as they are, dead or alive; for watching only."""
        handles = {"verifier": self._verifier.actor, "drafter": self._drafter.actor}
        return {name: handle for name, handle in handles.items() if handle is not None}

    def swap_drafter(self, source: str) -> DrafterConfig:
        """See :meth:`DrafterUpkeep.swap`; ``ValueError`` when there shall be no drafter."""
        if not self._has_drafter:
            raise ValueError("mode ar has no drafter: start with decode.mode=async")
        return self._upkeep.swap(
            source,
            target=self._verifier.info,
            block_size=self._block_size,
            state=lambda: self.drafter_state,
        )

    @property
    def verifier_info(self) -> ActorInfo:
        return self._verifier.info

    @property
    def drafter_info(self) -> ActorInfo | None:
        return self._drafter.info if self._has_drafter else None

    def _start_verifier(self) -> None:
        self._verifier.call("start", self._block_size)
        self._is_ready.set()

    def _link(self) -> None:
        """Build both directions anew and let the verifier use them."""
        pair = (self._verifier.actor, self._drafter.actor)
        is_one_node = self._verifier.info.node_id == self._drafter.info.node_id
        self.transport = _choose_transport(self._config.runtime.transport, is_one_node)
        for writer, reader in ((self._verifier, self._drafter), (self._drafter, self._verifier)):
            node_id = reader.info.node_id if self.transport == "channel" else None
            channel = writer.call("open_link", reader.actor, node_id)
            reader.call("accept_link", channel)
        self._verifier.call("attach_drafter")
        self._linked = pair

    def _watch(self, role: Role) -> None:
        while not self._closing.is_set():
            if role.is_alive(_WATCH_S):
                if role is self._drafter:
                    self._link_if_needed()
                    self._upkeep.note_service()
                continue
            if self._closing.is_set():
                return
            role.kill()
            if role is self._drafter:
                self._do_without_drafter()
            else:
                self._is_ready.clear()
            if self._closing.is_set():
                return
            logger.warning("the %s is gone; starting another", role.name)
            try:
                self._replace(role)
            except (RayError, TimeoutError) as error:
                if self._closing.is_set():
                    return
                logger.error("could not replace the %s: %s", role.name, error)
                role.kill()
                if role is self._verifier:
                    self._closing.wait(_RETRY_S)

    def _do_without_drafter(self) -> None:
        """Decode plainly, until it is time to start another drafter."""
        self._linked = None
        if self._is_ready.is_set():
            # Should it fail: a dead verifier is replaced by one that knows no drafter.
            with contextlib.suppress(RayError, TimeoutError):
                self._verifier.call("detach_drafter")
        self._upkeep.wait_for_next_try()

    def _replace(self, role: Role) -> None:
        role.create()
        role.wait_until_loaded()
        if role is self._verifier:
            self._start_verifier()
        else:
            role.call("check_pair", self._verifier.info)

    def _link_if_needed(self) -> None:
        pair = (self._verifier.actor, self._drafter.actor)
        if not self._is_ready.is_set() or self._linked == pair:
            return
        try:
            self._link()
        except (RayError, TimeoutError, ValueError) as error:
            # Mostly one of them has just died; once it is replaced, this is tried again.
            logger.warning("could not link the actors: %s", error)


def _choose_transport(wanted: str, is_one_node: bool) -> str:
    can_use_channel = is_one_node and has_channels()
    if wanted == "channel" and not can_use_channel:
        reason = "this Ray has none" if is_one_node else "the actors are on different nodes"
        raise ValueError(f"runtime.transport=channel cannot work, {reason}: use auto or call")
    if wanted == "auto":
        return "channel" if can_use_channel else "call"
    return wanted
