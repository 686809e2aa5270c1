"""One of the two actors, through all its lives: made, loaded, asked, watched, killed."""

import logging
import threading
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from d3d_ray.config import EngineConfig
from d3d_ray.runtime.actor import ActorInfo, LifeSign
from d3d_ray.runtime.placement import Placement

logger = logging.getLogger(__name__)


class Role:
    """One of the two actors, through all its lives."""

    def __init__(self, name: str, config: EngineConfig, placement: Placement, cls: type) -> None:
        self.name = name
        runtime = config.runtime
        is_verifier = name == "verifier"
        self.config = config
        """Of the next life."""
        bundle = placement.verifier_bundle if is_verifier else placement.drafter_bundle
        self._options = placement.options(bundle)
        self._num_threads = runtime.verifier_cpus if is_verifier else runtime.drafter_cpus
        self._cls: Any = ray.remote(cls)
        self.actor: Any = None
        self._info: ActorInfo | None = None
        self._watching: Any = None
        self._ping: Any = None
        self._silent_s = self._stalled_s = 0.0
        self._life_sign = LifeSign(None, 0)
        self.num_restarts = 0
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def info(self) -> ActorInfo:
        assert self._info is not None, f"the {self.name} is not loaded yet"
        return self._info

    @property
    def num_served(self) -> int:
        """What the actor has done in this life, see :class:`LifeSign`."""
        return self._life_sign.num_served

    def adopt(self, info: ActorInfo, config: EngineConfig) -> None:
        """The actor has loaded another model into this life; the next ones begin with it."""
        self._info, self.config = info, config

    def create(self) -> None:
        with self._lock:
            if not self._is_closed:  # Otherwise nobody would ever kill it.
                self.num_restarts += self.actor is not None
                options = self._cls.options(**self._options)
                self.actor = options.remote(self.config, self._num_threads)

    def wait_until_loaded(self) -> None:
        """Raises as :meth:`call` does."""
        self._info = self.call("load", timeout_s=self.config.runtime.load_timeout_s)
        self._watching = self.actor.watch.remote()
        self._ping, self._silent_s, self._stalled_s = None, 0.0, 0.0
        self._life_sign = LifeSign(None, 0)

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method and wait, ``runtime.call_timeout_s`` unless told otherwise.

        Raises ``RayError`` or ``TimeoutError``, see :func:`cause_of`.
        """
        timeout_s = timeout_s or self.config.runtime.call_timeout_s
        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"the {self.name} did not answer {method} within {timeout_s:g} s"
            ) from error

    def is_alive(self, timeout_s: float) -> bool:
        """Watch for up to ``timeout_s``; False when the actor is dead, broken, silent or stuck."""
        if self._ping is None:
            self._ping = self.actor.ping.remote()
        try:
            ready, _ = ray.wait([self._watching, self._ping], timeout=timeout_s)
            ray.get(ready)
            if ready:
                life_sign = ray.get(self._ping)
                self._ping, self._silent_s = None, 0.0
                ray.get(ray.wait([self._watching], timeout=timeout_s)[0])
                return self._is_moving(life_sign, timeout_s)
        except RayError as error:
            if not self._is_closed:
                logger.warning("the %s failed: %s", self.name, str(error).splitlines()[0])
            return False
        # Not the clock's time: this process may have been stopped, and the actor is not to blame.
        self._silent_s += timeout_s
        return self._silent_s < self.config.runtime.heartbeat_s

    def _is_moving(self, life_sign: LifeSign, passed_s: float) -> bool:
        """Whether the working thread has ended a step lately; a long pass is let live."""
        num_steps, self._life_sign = self._life_sign.num_steps, life_sign
        is_stuck = life_sign.num_steps is not None and life_sign.num_steps == num_steps
        self._stalled_s = self._stalled_s + passed_s if is_stuck else 0.0
        if self._stalled_s < self.config.runtime.max_pass_s:
            return True
        logger.warning(
            "the %s has worked at one step for %g s (runtime.max_pass_s)",
            self.name,
            self._stalled_s,
        )
        return False

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
