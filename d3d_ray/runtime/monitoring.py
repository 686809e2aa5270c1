"""How an engine does: counters, and whether it still decodes."""

import asyncio
import time
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from d3d_ray.decode.tally import Tally
from d3d_ray.records import Request
from d3d_ray.runtime.role import cause_of
from d3d_ray.runtime.supervisor import Supervisor

_SHOWN = ("running", "waiting", "kv_tokens", "kv_budget_tokens")


class Monitor:
    """Snapshots of both actors. One that is dead or silent is shown as it was last seen.

    Keys: ``running``, ``waiting`` (requests), ``kv_tokens``, ``kv_budget_tokens``, those of
    :meth:`Tally.counters`, ``drafter_passes``, ``verifier_restarts``, ``drafter_restarts``,
    ``verifier_up``, ``drafter_up`` (it has answered this time). A new life counts from 0.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._seen: dict[str, dict[str, Any]] = {
            "verifier": dict.fromkeys(_SHOWN, 0) | Tally(0).counters(),
            "drafter": {"passes": 0},
        }

    def counters(self, timeout_s: float) -> dict[str, Any]:
        actors = self._supervisor.actors
        asked = {name: actor.counters.remote() for name, actor in actors.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        up = dict.fromkeys(self._seen, False)
        for name, reference in asked.items():
            try:
                self._seen[name] = ray.get(reference, timeout=0)
                up[name] = True
            except RayError:  # Dead, still loading, or too slow to answer.
                continue
        verifier = self._seen["verifier"]
        return {
            **{key: verifier[key] for key in (*_SHOWN, *Tally(0).counters())},
            "drafter_passes": self._seen["drafter"]["passes"],
            **{f"{name}_restarts": n for name, n in self._supervisor.num_restarts.items()},
            **{f"{name}_up": is_up for name, is_up in up.items()},
        }


async def check_health(supervisor: Supervisor, probe: Request, timeout_s: float) -> None:
    """Raises ``RuntimeError`` unless the verifier decodes within ``timeout_s``."""
    until = time.monotonic() + timeout_s
    try:
        verifier = await asyncio.to_thread(supervisor.verifier, timeout_s)
        left_s = max(0.0, until - time.monotonic())
        # The actor gives up first, or the probe would go on in there.
        await asyncio.wait_for(_wait(verifier.probe.remote(probe, 0.9 * left_s)), left_s)
    except TimeoutError as error:
        raise RuntimeError(f"the verifier decoded nothing within {timeout_s:g} s") from error
    except RayActorError as error:
        raise RuntimeError("the verifier is dead; another is being started") from error
    except RayError as error:
        raise RuntimeError(f"the verifier cannot decode: {cause_of(error)}") from error


async def _wait(reference: Any) -> None:
    await reference
