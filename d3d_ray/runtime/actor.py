"""What both Ray actors share. Each owns one model on one device, and a thread that works on it.

::

    verifier actor                                  drafter actor
      event loop: stream, cancel, links               event loop: links
      decode thread: Scheduler.step  ── link ──►      link thread:  DraftWorker.receive
      link thread: RemoteDrafter     ◄── link ──      draft thread: DraftWorker.step

The decode thread waits for: a table (until a deadline), or a new request. The draft thread waits
for: a message. Neither ever waits for the other without a deadline.
"""

import asyncio
import gc
import itertools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import torch

from d3d_ray.config import EngineConfig
from d3d_ray.models.cpu import keep_freed_memory
from d3d_ray.runtime.channel import ChannelReceiver, open_sender
from d3d_ray.runtime.links import Sender

logger = logging.getLogger(__name__)

_STEP_TIMEOUT_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorInfo:
    """What an actor says of itself once its model is loaded."""

    pid: int
    node_id: str
    device: str
    """``cpu``, or the GPU's UUID."""
    num_threads: int
    vocab_size: int
    max_positions: int
    block_size: int = 0
    num_layers: int = 0
    is_trained: bool = True
    stop_ids: frozenset[int] = frozenset()
    kv_budget_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LifeSign:
    """What an actor's working thread has done in this life."""

    num_steps: int | None
    """Steps of its loop; None = it has not started. They go on when there is nothing to do."""
    num_served: int
    """Tables of a drafter; rounds and chunks of prompts of a verifier."""


class LinkedActor:
    """What both actors share: a device, a working thread, links, and a life to be watched."""

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        torch.set_num_threads(num_threads)
        keep_freed_memory()
        self._config = config
        self._device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self._sender: Sender | None = None
        self._receiver: ChannelReceiver | None = None
        self._failure: BaseException | None = None
        self._num_steps: int | None = None

    def _start(self, step: Callable[[float], Any], name: str) -> None:
        # The models' millions of objects stay; a full collection in mid-round takes milliseconds.
        gc.collect()
        gc.freeze()

        def run() -> None:
            try:
                for self._num_steps in itertools.count():
                    step(_STEP_TIMEOUT_S)
            except BaseException as error:
                logger.exception("the %s stopped", name)
                self._failure = error
                self._fail(error)

        threading.Thread(target=run, name=name, daemon=True).start()

    def _fail(self, error: BaseException) -> None:
        """The working thread has ended with an error."""

    def _receive(self, message: Any) -> None:
        raise NotImplementedError

    def _info(self, **fields: Any) -> ActorInfo:
        device = "cpu"
        if self._device.type == "cuda":
            device = str(torch.cuda.get_device_properties(self._device).uuid)
        return ActorInfo(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            device=device,
            num_threads=torch.get_num_threads(),
            **fields,
        )

    async def open_link(self, peer: Any, peer_node_id: str | None) -> Any:
        """Make the writing end towards ``peer``: a channel, or calls when no node id is given."""
        if self._sender is not None:
            self._sender.close()
        self._sender, reading_end = open_sender(peer, peer_node_id)
        return reading_end

    async def accept_link(self, channel: Any) -> None:
        """Start to read what the peer writes; with ``None`` it calls ``deliver``."""
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)
        self._receiver = None if channel is None else ChannelReceiver(channel, self._take)

    async def deliver(self, message: Any) -> None:
        self._take(message)

    def _take(self, message: Any) -> None:
        try:
            self._receive(message)
        except Exception as error:  # Or nobody would hear of it: ping() tells it on.
            logger.exception("a message could not be taken in")
            self._failure = error

    async def ping(self) -> LifeSign:
        """Answers while the actor lives; raises when its working thread does not.

        A thread that hangs shows by steps that stay the same.
        """
        if self._failure is not None:
            raise RuntimeError(f"the actor cannot go on: {self._failure!r}")
        return LifeSign(self._num_steps, self._num_served())

    def _num_served(self) -> int:
        raise NotImplementedError

    async def watch(self) -> None:
        """Never returns; its reference breaks in the moment the actor dies."""
        await asyncio.Event().wait()
