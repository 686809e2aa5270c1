"""The actor that owns the target and the decode loop; answers are streamed from here."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import torch

from d3d_ray.config import EngineConfig
from d3d_ray.decode.dflash import FeatureDrafting
from d3d_ray.decode.rescoring import Candidate, find_top_two_between_rounds
from d3d_ray.decode.scheduler import Scheduler
from d3d_ray.models.cpu import pack_weights
from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.dflash_folder import load_dflash
from d3d_ray.models.loading import load_target
from d3d_ray.models.target import Target
from d3d_ray.records import Chunk, Finish, Request
from d3d_ray.runtime.actor import ActorInfo, LinkedActor
from d3d_ray.runtime.links import RemoteDrafter
from d3d_ray.runtime.placement import available_memory

_PROBE_S = 0.05


class VerifierActor(LinkedActor):
    """Owns the target and the decode loop; answers are streamed from here."""

    async def load(self) -> ActorInfo:
        """Load the model; raises what the loading raises. ``start`` comes next."""
        self._target = load_target_of(self._config, self._device)
        self._dflash = load_dflash_of(self._config, self._target)
        self._kv_budget_tokens = self._config.runtime.kv_budget_tokens or self._free_kv_tokens()
        self._scheduler: Scheduler | None = None
        self._remote: RemoteDrafter | None = None
        self._streams: dict[str, asyncio.Queue[Chunk]] = {}
        self._loop = asyncio.get_running_loop()
        return self._info(
            vocab_size=self._target.vocab_size,
            max_positions=self._target.max_positions,
            stop_ids=self._target.stop_ids,
            kv_budget_tokens=self._kv_budget_tokens,
        )

    async def start(self, block_size: int) -> None:
        """Start the decode thread, without a drafter yet."""
        decode, runtime = self._config.decode, self._config.runtime
        dflash = None
        if self._dflash is not None:
            # The blocks of both drafters have the same bits then.
            block_size = max(block_size, self._dflash.block_size)
            dflash = FeatureDrafting(self._dflash, is_noise_shared=decode.draft_noise == "shared")
        if self._config.target.fixed_rows:
            self._target.fix_rows(block_size)
        self._scheduler = Scheduler(
            self._target,
            None,
            on_chunk=self._publish,
            block_size=block_size,
            vocab_size=self._target.vocab_size,
            prefill_chunk=decode.prefill_chunk,
            max_wait_s=decode.max_wait_ms / 1e3,
            kv_budget_tokens=self._kv_budget_tokens,
            max_requests=runtime.max_requests,
            miss_policy=decode.miss_policy,
            is_never_slower=decode.never_slower and decode.simulate_acceptance is None,
            dflash=dflash,
        )
        self._start(self._scheduler.step, "decode thread")

    async def attach_drafter(self) -> None:
        """Use the link just opened; in the middle of answers if there are any."""
        assert self._scheduler is not None and self._sender is not None
        self._remote = RemoteDrafter(self._sender)
        self._scheduler.attach(self._remote)

    async def detach_drafter(self) -> None:
        if self._scheduler is not None:
            self._scheduler.attach(None)

    async def stream(self, request: Request, *, is_probe: bool = False) -> AsyncIterator[Chunk]:
        """Decode a request; a chunk a round. Ending the iteration early cancels it.

        Raises ``OverflowError`` when too many wait, unless it is a probe.
        """
        assert self._scheduler is not None, "start() comes first"
        if self._failure is not None:
            raise RuntimeError(f"the verifier cannot go on: {self._failure!r}")
        runtime = self._config.runtime
        if len(self._streams) >= runtime.max_requests + runtime.max_waiting and not is_probe:
            raise OverflowError(
                f"{len(self._streams)} requests are in flight or waiting: try again later, "
                "or raise runtime.max_waiting"
            )
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._streams[request.id] = chunks
        finish: Finish | None = None
        try:
            self._scheduler.submit(request)
            while finish is None:
                chunk = await chunks.get()
                finish = chunk.finish
                yield chunk
        finally:
            self._streams.pop(request.id, None)
            if finish is None:
                self._scheduler.cancel(request.id)

    async def answer(self, request: Request, *, is_probe: bool = False) -> list[Chunk]:
        """Decode a request to its end; all its chunks at once."""
        return [chunk async for chunk in self.stream(request, is_probe=is_probe)]

    async def use_threads(self, num_threads: int) -> None:
        """Decode with so many torch threads from the next round on; of effect on a CPU only."""
        assert self._scheduler is not None, "start() comes first"
        # Torch counts by thread, so the decode thread must say it.
        self._scheduler.run_between_rounds(lambda: torch.set_num_threads(num_threads))

    async def cancel(self, request_id: str) -> None:
        if self._scheduler is not None:
            self._scheduler.cancel(request_id)

    async def find_top_two(
        self, request: Request, output: tuple[int, ...]
    ) -> tuple[Candidate, Candidate]:
        """The plain target's two best tokens behind prompt and ``output``; disturbs no request."""
        assert self._scheduler is not None, "start() comes first"
        return await asyncio.wrap_future(
            find_top_two_between_rounds(self._scheduler, self._target, request, output)
        )

    async def probe(self, request: Request, timeout_s: float) -> None:
        """Wait for the answer to ``request``, which may find the queue full.

        While it waits for its turn, a block that the decode thread finishes for others is enough.
        Raises ``TimeoutError`` when neither comes, and what :meth:`stream` raises.
        """
        assert self._scheduler is not None, "start() comes first"
        before = self._num_served()
        answer = asyncio.create_task(self.answer(request, is_probe=True))
        deadline = time.monotonic() + timeout_s
        try:
            while not answer.done():
                if self._scheduler.num_waiting and self._num_served() > before:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no token within {timeout_s:g} s: the decode thread hangs")
                await asyncio.wait([answer], timeout=_PROBE_S)
            last = answer.result()[-1]
            if last.finish is Finish.ERROR:
                raise RuntimeError(last.error)
        finally:
            answer.cancel()

    async def counters(self) -> dict[str, Any]:
        """What happened in this life, and what happens at present. Never waits for a round."""
        assert self._scheduler is not None
        dropped = {f"dropped_{k}": n for k, n in self._scheduler.correspondence.dropped.items()}
        return {
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "streams": len(self._streams),
            "kv_tokens": self._scheduler.num_kv_tokens,
            "kv_budget_tokens": self._kv_budget_tokens,
            **self._scheduler.tally.counters(),
            **dropped,
        }

    def _num_served(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.tally.num_blocks

    def _receive(self, message: Any) -> None:
        if self._remote is not None:
            self._remote.deliver(message)

    def _publish(self, chunk: Chunk) -> None:
        """Called by the decode thread; hands the chunk to the event loop."""
        self._loop.call_soon_threadsafe(self._put, chunk)

    def _put(self, chunk: Chunk) -> None:
        chunks = self._streams.get(chunk.request)
        if chunks is not None:  # else the caller is gone
            chunks.put_nowait(chunk)

    def _fail(self, error: BaseException) -> None:
        if self._scheduler is not None:
            self._scheduler.fail_all(f"the verifier cannot go on: {error!r}")

    def _free_kv_tokens(self) -> int:
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
        else:
            free_bytes = available_memory()
        # Where the drafter takes its memory from the same place, it may not have done so yet.
        is_shared = self._device.type == "cpu" or self._config.runtime.share_device
        share = 0.4 if is_shared else 0.8
        token_bytes = self._target.kv_bytes_per_token
        if self._dflash is not None:
            token_bytes += self._dflash.kv_bytes_per_token
        return max(1, int(share * free_bytes / token_bytes))


def load_target_of(config: EngineConfig, device: torch.device) -> Target:
    """The target that the settings ask for."""
    target = load_target(
        config.target.source,
        dtype=getattr(torch, config.target.dtype),
        device=device,
        num_devices=config.runtime.verifier_gpus if device.type == "cuda" else 1,
        max_context=config.target.max_context,
    )
    pack_weights(target.model)
    return target


def load_dflash_of(config: EngineConfig, target: Target) -> DFlashDrafter | None:
    """The DFlash drafter that the settings ask for; it reads from the target already."""
    if config.dflash.source is None:
        return None
    drafter = load_dflash(
        config.dflash.source,
        target.model,
        target_source=config.target.source,
        vocab_size=target.vocab_size,
        dtype=getattr(torch, config.dflash.dtype or config.target.dtype),
    )
    drafter.fuse()
    target.read_with(drafter)
    return drafter
