"""The preflight: everything that must hold before an engine with these settings can run well.

Nothing is downloaded. What cannot be looked at, because a model is not here, is said to be so.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from d3d_ray.bench.check import Check, Status, gigabytes
from d3d_ray.bench.curves import judge_fit
from d3d_ray.bench.machine import check_devices_here, check_shared_memory, check_versions
from d3d_ray.bench.pair import Pair, check_fit, check_pairing
from d3d_ray.bench.probe import Device, Probe, local_device, measure_hops
from d3d_ray.config import EngineConfig
from d3d_ray.runtime.channel import has_channels
from d3d_ray.runtime.placement import Placement, check_devices, place

_MIN_STORE_BYTES = 75 * 1024**2
"""Ray starts with no smaller object store."""


def examine(config: EngineConfig, *, with_curves: bool = True) -> Iterator[Check]:
    """Make the checks one after the other, the cheap ones first."""
    yield from check_versions()
    yield check_devices_here()
    pair = Pair.find(config)
    yield check_pairing(pair)
    free_bytes = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    with contextlib.ExitStack() as closing:
        start = _start_ray(closing)
        yield start
        if start.status is Status.FAIL:
            yield check_shared_memory(free_bytes, _MIN_STORE_BYTES)
            yield check_fit(pair, local_device(), local_device())
            return
        yield check_shared_memory(free_bytes, _store_bytes())
        try:
            placement = place(
                config.runtime, has_drafter=True, timeout_s=config.runtime.call_timeout_s
            )
        except (ValueError, TimeoutError) as error:
            yield Check(name="placement", status=Status.FAIL, text=str(error))
            yield check_fit(pair, local_device(), local_device())
            return
        closing.callback(placement.remove)
        yield from _Actors(config, pair, placement, closing).examine(with_curves)


class _Actors:
    """Checks that need two processes where the verifier and the drafter will be."""

    def __init__(
        self,
        config: EngineConfig,
        pair: Pair,
        placement: Placement,
        closing: contextlib.ExitStack,
    ) -> None:
        self._config = config
        self._pair = pair
        runtime = config.runtime
        self._verifier = self._probe(placement, placement.verifier_bundle, runtime.verifier_cpus)
        self._drafter = self._probe(placement, placement.drafter_bundle, runtime.drafter_cpus)
        for probe in (self._verifier, self._drafter):
            closing.callback(ray.kill, probe)

    def _probe(self, placement: Placement, bundle: int | None, num_threads: int) -> Any:
        return ray.remote(Probe).options(**placement.options(bundle)).remote(num_threads)

    def examine(self, with_curves: bool) -> Iterator[Check]:
        try:
            devices = ray.get(
                [self._verifier.device.remote(), self._drafter.device.remote()],
                timeout=self._config.runtime.load_timeout_s,
            )
        except (RayError, GetTimeoutError) as error:
            yield Check(
                name="placement",
                status=Status.FAIL,
                text=f"no actor comes up in its bundle: {first_line(error)}; see Ray's log",
            )
            return
        yield self._placement(*devices)
        fit = check_fit(self._pair, *devices)
        yield fit
        transport, hop_ms = self._transport(*devices)
        yield transport
        if with_curves and fit.status is not Status.FAIL:
            yield from self._curves(hop_ms)

    def _placement(self, verifier: Device, drafter: Device) -> Check:
        data = {"verifier": dataclasses.asdict(verifier), "drafter": dataclasses.asdict(drafter)}
        try:
            check_devices(verifier.uuid, drafter.uuid, self._config.runtime)
        except ValueError as error:
            return Check(name="placement", status=Status.FAIL, text=str(error), data=data)
        where = "one node" if verifier.node_id == drafter.node_id else "two nodes"
        text = f"on {where}: verifier on {verifier}; drafter on {drafter}"
        return Check(name="placement", status=Status.OK, text=text, data=data)

    def _transport(self, verifier: Device, drafter: Device) -> tuple[Check, float]:
        """Time both transports; also the hop of the one that the settings lead to."""
        wanted = self._config.runtime.transport
        can_use_channel = has_channels() and verifier.node_id == drafter.node_id
        used = wanted if wanted != "auto" else "channel" if can_use_channel else "call"
        hops = {}
        for name in ["channel", "call"] if can_use_channel else ["call"]:
            ids = (drafter.node_id, verifier.node_id) if name == "channel" else (None, None)
            try:
                hops[name] = measure_hops(self._verifier, self._drafter, *ids)
            except (RayError, GetTimeoutError) as error:
                text = f"the transport {name!r} does not work: {first_line(error)}"
                return Check(name="transport", status=Status.FAIL, text=text), 0.0
        data = {"used": used, **{name: dataclasses.asdict(hop) for name, hop in hops.items()}}
        times = "; ".join(
            f"{name} {hop.median_ms:.3f} ms a hop (99 %: {hop.p99_ms:.3f} ms)"
            for name, hop in hops.items()
        )
        if used not in hops:
            text = f"runtime.transport={used} cannot work here: use auto or call; {times}"
            return Check(name="transport", status=Status.FAIL, text=text, data=data), 0.0
        text = f"uses {used}: {times}"
        return Check(name="transport", status=Status.OK, text=text, data=data), hops[used].median_ms

    def _curves(self, hop_ms: float) -> Iterator[Check]:
        config = self._pair.config
        if not self._pair.is_complete:
            text = f"no curves: {self._pair.missing}"
            yield Check(name="curves", status=Status.WARN, text=text)
            return
        timeout_s = config.runtime.load_timeout_s
        try:
            draft, block_size = ray.get(self._drafter.draft_curve.remote(config), timeout=timeout_s)
            verify = ray.get(
                self._verifier.verify_curve.remote(config, block_size), timeout=timeout_s
            )
        except (RayError, GetTimeoutError) as error:
            text = f"the models cannot be timed: {first_line(error)}"
            yield Check(name="curves", status=Status.FAIL, text=text)
            return
        for name, curve in (("T_verify", verify), ("T_draft", draft)):
            data = dataclasses.asdict(curve)
            yield Check(name=name, status=Status.OK, text=str(curve), data=data)
        rows = config.decode.max_draft_rows
        if block_size in verify.skipped or rows in draft.skipped:
            text = "the context is too short for a block behind the cached tokens"
            yield Check(name="balance", status=Status.WARN, text=text)
            return
        fits, text = judge_fit(
            verify, draft, block_size=block_size, max_draft_rows=rows, hop_ms=hop_ms
        )
        data = {
            "fits": fits,
            "verify_ms": verify.milliseconds[block_size],
            "draft_ms": draft.milliseconds[rows],
            "hop_ms": hop_ms,
            "block_size": block_size,
            "max_draft_rows": rows,
        }
        yield Check(name="balance", status=Status.OK if fits else Status.WARN, text=text, data=data)


def _start_ray(closing: contextlib.ExitStack) -> Check:
    """Connect to Ray or start it, just as the engine does."""
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS")
            what = f"connect to RAY_ADDRESS={address}" if address else "start"
            text = f"Ray cannot {what}: {first_line(error)}; try `ray status`"
            return Check(name="ray", status=Status.FAIL, text=text)
        closing.callback(ray.shutdown)
    total, free = ray.cluster_resources(), ray.available_resources()
    figures = ", ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k}s" for k in ("CPU", "GPU"))
    how = "connected" if os.environ.get("RAY_ADDRESS") or not is_ours else "started"
    store = gigabytes(_store_bytes())
    text = f"{how}: {len(ray.nodes())} node(s), free: {figures}, object store of {store}"
    return Check(name="ray", status=Status.OK, text=text, data={"total": total, "free": free})


def _store_bytes() -> int:
    """The object store of the node that this process is on."""
    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == own:
            return int(node["Resources"].get("object_store_memory", _MIN_STORE_BYTES))
    return _MIN_STORE_BYTES


def first_line(error: BaseException) -> str:
    """What went wrong, without Ray's traceback: the cause, where Ray has kept it."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
