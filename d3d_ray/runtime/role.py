"""One of the two actors, through all its lives: made, loaded, asked, watched, killed."""

import logging
import threading
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from d3d_ray.config import EngineConfig
from d3d_ray.runtime.actor import ActorInfo
from d3d_ray.runtime.placement import Placement

logger = logging.getLogger(__name__)


class Role:
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
        self._silent_s = 0.0
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def info(self) -> ActorInfo:
        assert self._info is not None, f"the {self.name} is not loaded yet"
        return self._info

    def create(self) -> None:
        with self._lock:
            if not self._is_closed:  # Otherwise nobody would ever kill it.
                options = self._cls.options(**self._options)
                self.actor = options.remote(self._config, self._num_threads)

    def wait_until_loaded(self) -> None:
        """Raises as :meth:`call` does."""
        self._info = self._get("load", (), self._config.runtime.load_timeout_s)
        self._watching = self.actor.watch.remote()
        self._ping, self._silent_s = None, 0.0

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait; raises ``RayError`` or ``TimeoutError``, see :func:`cause_of`."""
        return self._get(method, args, self._config.runtime.call_timeout_s)

    def _get(self, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the {self.name} did not answer {method} within {timeout_s:g} s"
            ) from error

    def is_alive(self, timeout_s: float) -> bool:
        """Watch for up to ``timeout_s``; False when the actor is dead, broken, or silent."""
        if self._ping is None:
            self._ping = self.actor.ping.remote()
        try:
            ready, _ = ray.wait([self._watching, self._ping], timeout=timeout_s)
            ray.get(ready)
            if ready:
                self._ping, self._silent_s = None, 0.0
                ray.get(ray.wait([self._watching], timeout=timeout_s)[0])
                return True
        except RayError as error:
            if not self._is_closed:
                logger.warning("the %s failed: %s", self.name, str(error).splitlines()[0])
            return False
        # Not the clock's time: this process may have been stopped, and the actor is not to blame.
        self._silent_s += timeout_s
        return self._silent_s < self._config.runtime.heartbeat_s

    def kill(self) -> None:
        if self.actor is not None:
            ray.kill(self.actor)

    def close(self) -> None:
        """Kill the actor; there will be no other."""
        with self._lock:
            self._is_closed = True
            self.kill()


def cause_of(error: RayError) -> Exception:
    """What was raised in the actor, without Ray's wrapping, which has pages of traceback in it."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, ValueError | OSError | RuntimeError | OverflowError):
        return cause
    lines = str(error).strip().splitlines()
    return RuntimeError(" ".join(lines) if isinstance(error, RayActorError) else lines[-1])
