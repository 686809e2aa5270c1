"""A small actor in the place of the verifier or the drafter: looks around and measures there."""

import asyncio
import queue
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import ray
import torch

from d3d_ray.bench.curves import ROWS, Curve, draft_curve, verify_curve
from d3d_ray.config import EngineConfig
from d3d_ray.models.cpu import keep_freed_memory
from d3d_ray.records import Branch, Outcome, Table
from d3d_ray.runtime.channel import ChannelReceiver, open_sender
from d3d_ray.runtime.drafter_actor import load_drafter_of
from d3d_ray.runtime.links import Sender
from d3d_ray.runtime.placement import available_memory
from d3d_ray.runtime.verifier_actor import load_target_of

NUM_ROUND_TRIPS = 300
_NUM_WARMUPS = 50
_REPLY_TIMEOUT_S = 5.0
_OUTCOME = Outcome("probe", 1, tuple(range(1000, 1256)), (), start=0)
_TABLE = Table("probe", 1, tuple(Branch(k, k, tuple(range(1000, 1016))) for k in range(16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one of the two actors gets to work on."""

    node_id: str
    name: str
    """``CPU``, or the name of the (first) GPU."""
    uuid: str
    """``cpu``, or the UUID of the (first) GPU, as the actors report it."""
    num_gpus: int
    num_threads: int
    free_bytes: int
    """Of all its GPUs together, or of the machine."""

    def __str__(self) -> str:
        what = f"{self.num_gpus} x {self.name}" if self.num_gpus > 1 else self.name
        threads = "" if self.num_gpus else f" with {self.num_threads} torch threads"
        return f"{what}{threads}, {self.free_bytes / 1e9:.1f} GB free"


@dataclass(frozen=True, slots=True)
class Hops:
    """Half of a round trip between the two actors, in milliseconds."""

    median_ms: float
    p99_ms: float


class Probe:
    """One end of a link, and a place to time a model in."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        keep_freed_memory()
        self._sender: Sender | None = None
        self._receiver: ChannelReceiver | None = None
        self._arrived: queue.Queue[Any] = queue.Queue()
        self._is_echo = threading.Event()

    async def device(self) -> Device:
        return local_device()

    async def open_link(self, peer: Any, peer_node_id: str | None) -> Any:
        """As the actors do: a channel, or calls when no node id is given."""
        self._sender, reading_end = open_sender(peer, peer_node_id)
        return reading_end

    async def accept_link(self, channel: Any, is_echo: bool) -> None:
        """Read what the peer writes; an echo answers each message with a table."""
        if is_echo:
            self._is_echo.set()
        if channel is not None:
            self._receiver = ChannelReceiver(channel, self._receive)

    async def deliver(self, message: Any) -> None:
        self._receive(message)

    def _receive(self, message: Any) -> None:
        if not self._is_echo.is_set():
            self._arrived.put(message)
        elif self._sender is not None:
            self._sender.put(_TABLE)

    async def round_trips(self) -> list[int]:
        """Nanoseconds of each. Raises ``TimeoutError`` when the echo does not answer."""
        return await asyncio.to_thread(self._round_trips)

    def _round_trips(self) -> list[int]:
        assert self._sender is not None, "open_link() comes first"
        times = []
        for _ in range(_NUM_WARMUPS + NUM_ROUND_TRIPS):
            start = time.perf_counter_ns()
            try:
                is_sent = self._sender.put(_OUTCOME)
                reply = self._arrived.get(timeout=_REPLY_TIMEOUT_S) if is_sent else None
            except queue.Empty:
                reply = None
            if reply is None:
                raise TimeoutError(f"no answer of the peer within {_REPLY_TIMEOUT_S:g} s")
            times.append(time.perf_counter_ns() - start)
        return times[_NUM_WARMUPS:]

    async def close_link(self) -> None:
        for end in (self._sender, self._receiver):
            if end is not None:
                await asyncio.to_thread(end.close)
        self._sender = self._receiver = None
        self._is_echo.clear()

    async def verify_curve(self, config: EngineConfig, block_size: int) -> Curve:
        """Load the target as the verifier does, and time it."""
        target = load_target_of(config, _torch_device())
        if config.target.fixed_rows:
            target.fix_rows(block_size)
        return verify_curve(target, (*ROWS, block_size))

    async def draft_curve(self, config: EngineConfig) -> tuple[Curve, int]:
        """Load the drafter as its actor does, and time it; returns its block size as well."""
        drafter = load_drafter_of(config, _torch_device())
        rows = (*ROWS, config.decode.max_draft_rows)
        return draft_curve(drafter, rows), drafter.block_size


def measure_hops(near: Any, far: Any, far_node_id: str | None, near_node_id: str | None) -> Hops:
    """Link two probes, both ways, and time messages of 256 tokens; without node ids by calls."""
    for writer, reader, node_id, is_echo in (
        (near, far, far_node_id, True),
        (far, near, near_node_id, False),
    ):
        channel = ray.get(writer.open_link.remote(reader, node_id), timeout=30)
        ray.get(reader.accept_link.remote(channel, is_echo), timeout=30)
    times = sorted(ray.get(near.round_trips.remote(), timeout=60))
    ray.get([near.close_link.remote(), far.close_link.remote()], timeout=30)
    p99 = times[min(len(times) - 1, round(0.99 * len(times)))]
    return Hops(median(times) / 2e6, p99 / 2e6)


def local_device() -> Device:
    """What this very process would work on."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = torch.cuda.get_device_properties(0) if num_gpus else None
    free = [torch.cuda.mem_get_info(index)[0] for index in range(num_gpus)]
    in_ray = ray.is_initialized()
    return Device(
        node_id=ray.get_runtime_context().get_node_id() if in_ray else "",
        name=first.name if first else "CPU",
        uuid=str(first.uuid) if first else "cpu",
        num_gpus=num_gpus,
        num_threads=torch.get_num_threads(),
        free_bytes=sum(free) if num_gpus else available_memory(),
    )


def _torch_device() -> torch.device:
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
