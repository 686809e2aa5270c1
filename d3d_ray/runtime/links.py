"""How messages travel between the two actors: one small interface, two transports.

``channel``: a buffered shared-memory channel, mutable objects of Ray's object store; about 0.05 ms
a round trip on one node. ``call``: plain actor calls, about 0.8 ms; for actors on different nodes,
or for a Ray without the (experimental) channel API.

Nothing wakes the reader of a channel whose writer has died, so every read has a timeout.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayChannelError, RayChannelTimeoutError

from d3d_ray.records import FromDrafter, Table, ToDrafter

logger = logging.getLogger(__name__)

NUM_BUFFERS = 8
"""Messages on their way before a write is refused."""
BUFFER_BYTES = 1 << 20
_READ_TIMEOUT_S = 0.5


class Sender(Protocol):
    def put(self, message: Any) -> bool:
        """Hand over a message without blocking; False when the way is full or closed."""
        ...

    def close(self) -> None: ...


class ChannelSender:
    """The writing end of a shared-memory channel; must be made inside the writing actor."""

    def __init__(self, reader: Any, reader_node_id: str) -> None:
        from ray.experimental.channel import BufferedSharedMemoryChannel

        self.channel = BufferedSharedMemoryChannel(
            writer=ray.get_runtime_context().current_actor,
            reader_and_node_list=[(reader, reader_node_id)],
            num_shm_buffers=NUM_BUFFERS,
            typ=BUFFER_BYTES,
        )
        self._lock = threading.Lock()

    def put(self, message: Any) -> bool:
        with self._lock:
            try:
                self.channel.write(message, timeout=0)
            except RayChannelTimeoutError:
                return False
            except RayChannelError:  # closed: the peer is being replaced
                return False
        return True

    def close(self) -> None:
        self.channel.close()


class ChannelReceiver:
    """A thread that drains the reading end of a channel into a callback."""

    def __init__(self, channel: Any, on_message: Callable[[Any], None]) -> None:
        channel.ensure_registered_as_reader()
        self._channel = channel
        self._on_message = on_message
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._drain, name="d3d-link", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while not self._is_closed.is_set():
            try:
                message = self._channel.read(timeout=_READ_TIMEOUT_S)
            except RayChannelTimeoutError:
                continue
            except RayChannelError:
                return
            self._on_message(message)

    def close(self) -> None:
        self._is_closed.set()
        self._channel.close()
        self._thread.join(timeout=2 * _READ_TIMEOUT_S)


class CallSender:
    """Plain calls of the peer's ``deliver``; an async actor runs them in the order of sending."""

    def __init__(self, peer: Any) -> None:
        self._peer = peer
        self._pending: deque[Any] = deque()
        self._lock = threading.Lock()

    def put(self, message: Any) -> bool:
        with self._lock:
            if len(self._pending) >= NUM_BUFFERS:
                _, pending = ray.wait(
                    list(self._pending), num_returns=len(self._pending), timeout=0
                )
                self._pending = deque(pending)
            if len(self._pending) >= NUM_BUFFERS:
                return False
            self._pending.append(self._peer.deliver.remote(message))
        return True

    def close(self) -> None:
        self._pending.clear()


class RemoteDrafter:
    """The ``Drafter`` of the decode loop, at the far end of a link."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        # Not a SimpleQueue: in Python 3.11 its get() can block for good once a timeout is over.
        self._arrived: queue.Queue[FromDrafter] = queue.Queue()

    def send(self, message: ToDrafter) -> bool:
        return self._sender.put(message)

    def poll(self, timeout: float) -> list[FromDrafter]:
        messages: list[FromDrafter] = []
        try:
            messages.append(self._arrived.get(timeout=timeout) if timeout > 0 else self._next())
            while True:
                messages.append(self._next())
        except queue.Empty:
            return messages

    def _next(self) -> FromDrafter:
        return self._arrived.get_nowait()

    def deliver(self, message: FromDrafter) -> None:
        """Called by the link's thread for each message that arrives."""
        if isinstance(message, Table):
            message = replace(message, arrived_ns=time.monotonic_ns())
        self._arrived.put(message)


def has_channels() -> bool:
    """Whether this Ray still has the shared-memory channel."""
    try:
        from ray.experimental.channel import BufferedSharedMemoryChannel  # noqa: F401
    except ImportError:
        return False
    return True
