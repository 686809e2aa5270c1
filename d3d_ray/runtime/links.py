"""How messages travel between the two actors: one small interface, two transports.

``channel`` (see ``channel.py``): a buffered shared-memory channel, mutable objects of Ray's object
store, on one node. ``call``: plain actor calls, about ten times slower; for actors on different
nodes, or for a Ray without the (experimental) channel API.
"""

import queue
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any, Protocol

import ray

from d3d_ray.records import FromDrafter, Table, ToDrafter

NUM_BUFFERS = 4
"""Messages on their way before a write is refused."""


class Sender(Protocol):
    def put(self, message: Any) -> bool:
        """Hand over a message without blocking; False when the way is full or closed."""
        ...

    def close(self) -> None: ...


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
