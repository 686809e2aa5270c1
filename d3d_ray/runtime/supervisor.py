"""Starts the two actors, links them, watches them, and replaces the one that dies.

Two watching threads, one an actor. Each waits for: the reference that breaks when its actor dies
(at most a second at a time), and the answers to its pings. A dead drafter is replaced while the
verifier decodes on plainly; a dead verifier takes its requests with it, and is replaced.
"""

import logging
import threading
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from d3d_ray.config import EngineConfig
from d3d_ray.runtime.actor import ActorInfo
from d3d_ray.runtime.channel import has_channels
from d3d_ray.runtime.drafter_actor import DrafterActor
from d3d_ray.runtime.placement import Placement, check_devices
from d3d_ray.runtime.verifier_actor import VerifierActor

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_RETRY_S = 5.0


class Supervisor:
    """Owns both actor handles; other threads ask it for the verifier of the moment."""

    def __init__(self, config: EngineConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._verifier = _Role("verifier", config, placement, VerifierActor)
        self._drafter = _Role("drafter", config, placement, DrafterActor)
        self._has_drafter = config.decode.mode != "ar"
        self._link_lock = threading.Lock()
        self._is_ready = threading.Event()
        self._closing = threading.Event()
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
        self._start_verifier()
        if self._has_drafter:
            self._link()
        for role in roles:
            thread = threading.Thread(target=self._watch, args=[role], daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=2 * _WATCH_S)
        for role in (self._verifier, self._drafter):
            role.kill()

    def verifier(self) -> Any:
        """The verifier's handle; waits for a new one while it is being replaced.

        Raises ``TimeoutError`` when that takes longer than ``runtime.load_timeout_s``.
        """
        timeout_s = self._config.runtime.load_timeout_s
        if not self._is_ready.wait(timeout_s):
            raise TimeoutError(f"no verifier came up within {timeout_s:g} s: see the log")
        return self._verifier.actor

    def report_loss(self, verifier: Any) -> None:
        """A caller found this verifier dead; the next ones wait for another."""
        if verifier is self._verifier.actor:
            self._is_ready.clear()

    def drafter(self) -> Any | None:
        """The drafter's handle; may be dead. None when there is none."""
        return self._drafter.actor if self._has_drafter else None

    @property
    def verifier_info(self) -> ActorInfo:
        return self._verifier.info

    @property
    def drafter_info(self) -> ActorInfo | None:
        return self._drafter.info if self._has_drafter else None

    def _start_verifier(self) -> None:
        block_size = self._config.drafter.block_size or 1
        if self._has_drafter:
            block_size = self._drafter.info.block_size
        self._verifier.call("start", block_size)
        self._is_ready.set()

    def _link(self) -> None:
        """Build both directions anew and let the verifier use them."""
        with self._link_lock:
            is_one_node = self._verifier.info.node_id == self._drafter.info.node_id
            self.transport = _choose_transport(self._config.runtime.transport, is_one_node)
            for writer, reader in (
                (self._verifier, self._drafter),
                (self._drafter, self._verifier),
            ):
                node_id = reader.info.node_id if self.transport == "channel" else None
                channel = writer.call("open_link", reader.actor, node_id)
                reader.call("accept_link", channel)
            self._verifier.call("attach_drafter")

    def _watch(self, role: "_Role") -> None:
        while not self._closing.is_set():
            if role.is_alive(_WATCH_S):
                continue
            if self._closing.is_set():
                return
            logger.warning("the %s is gone; starting another", role.name)
            try:
                self._replace(role)
            except (RayError, TimeoutError) as error:
                logger.error("could not replace the %s: %s", role.name, error)
                role.kill()
                self._closing.wait(_RETRY_S)

    def _replace(self, role: "_Role") -> None:
        role.kill()
        if role is self._verifier:
            self._is_ready.clear()
        else:
            self._verifier.call("detach_drafter")
        role.create()
        role.wait_until_loaded()
        if role is self._verifier:
            self._start_verifier()
        if self._has_drafter:
            self._link()


class _Role:
    """One of the two actors, through all its lives."""

    def __init__(self, name: str, config: EngineConfig, placement: Placement, cls: type) -> None:
        self.name = name
        runtime = config.runtime
        is_verifier = name == "verifier"
        self._config = config
        bundle = placement.verifier_bundle if is_verifier else placement.drafter_bundle
        self._options = placement.options(bundle)
        self._num_threads = runtime.verifier_cpus if is_verifier else runtime.drafter_cpus
        self._cls: Any = ray.remote(cls)
        self.actor: Any = None
        self._info: ActorInfo | None = None
        self._watching: Any = None
        self._ping: Any = None
        self._pinged_at = 0.0

    @property
    def info(self) -> ActorInfo:
        assert self._info is not None, f"the {self.name} is not loaded yet"
        return self._info

    def create(self) -> None:
        self.actor = self._cls.options(**self._options).remote(self._config, self._num_threads)

    def wait_until_loaded(self) -> None:
        """Raises what the loading raises, ``TimeoutError`` when it takes too long."""
        self._info = self._get("load", (), self._config.runtime.load_timeout_s)
        self._watching = self.actor.watch.remote()
        self._ping, self._pinged_at = None, time.monotonic()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait; raises what it raises, ``RayError`` when it cannot answer."""
        return self._get(method, args, self._config.runtime.call_timeout_s)

    def _get(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=timeout_s)
        except RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the {self.name} did not answer {method} within {timeout_s:g} s"
            ) from error

    def is_alive(self, timeout_s: float) -> bool:
        """Watch for up to ``timeout_s``; False when the actor is dead, broken, or silent."""
        if self._ping is None:
            self._ping, self._pinged_at = self.actor.ping.remote(), time.monotonic()
        try:
            ready, _ = ray.wait([self._watching, self._ping], timeout=timeout_s)
            ray.get(ready)
            if ready:
                self._ping = None
                ray.get(ray.wait([self._watching], timeout=timeout_s)[0])
        except RayError as error:
            logger.warning("the %s failed: %s", self.name, str(error).splitlines()[0])
            return False
        return time.monotonic() - self._pinged_at < self._config.runtime.heartbeat_s

    def kill(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)


def _choose_transport(wanted: str, is_one_node: bool) -> str:
    can_use_channel = is_one_node and has_channels()
    if wanted == "channel" and not can_use_channel:
        reason = "this Ray has none" if is_one_node else "the actors are on different nodes"
        raise ValueError(f"runtime.transport=channel cannot work, {reason}: use auto or call")
    if wanted == "auto":
        return "channel" if can_use_channel else "call"
    return wanted
