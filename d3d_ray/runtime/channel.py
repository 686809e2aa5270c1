"""The shared-memory transport: a channel of Ray's object store, and a bell to wake its reader.

A blocking read of such a channel spins, which on two cores takes one from the models, and nothing
wakes the reader when the writer dies. So the reader sleeps on a named pipe: the writer puts a
message into the channel and then a byte into the pipe, which breaks when the writer dies.
"""

import os
import pickle
import select
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayChannelError, RayChannelTimeoutError

from d3d_ray.runtime.links import NUM_BUFFERS

BUFFER_BYTES = 1 << 20
"""Room for a prompt of about 200,000 tokens; a longer one makes the channel grow."""
_READ_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True)
class ReadingEnd:
    """What the writer hands to the reader, on the same node."""

    channel: Any
    bell: str
    """Path of the named pipe."""


class ChannelSender:
    """The writing end; must be made inside the writing actor."""

    def __init__(self, reader: Any, reader_node_id: str) -> None:
        from ray.experimental.channel import BufferedSharedMemoryChannel

        self._channel = BufferedSharedMemoryChannel(
            writer=ray.get_runtime_context().current_actor,
            reader_and_node_list=[(reader, reader_node_id)],
            num_shm_buffers=NUM_BUFFERS,
            typ=BUFFER_BYTES,
        )
        self._path = os.path.join(tempfile.gettempdir(), f"d3d-ray-{uuid.uuid4().hex}")
        os.mkfifo(self._path, mode=0o600)
        # Both ways, so that opening does not wait for the reader.
        self._bell = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        self._lock = threading.Lock()

    @property
    def reading_end(self) -> ReadingEnd:
        return ReadingEnd(self._channel, self._path)

    def put(self, message: Any) -> bool:
        """Hand over a message without blocking; False when the way is full or closed."""
        with self._lock:
            try:
                # Bytes take Ray's short way; its own serialisation of a record is slower.
                self._channel.write(pickle.dumps(message), timeout=0)
                os.write(self._bell, b"\0")
            except (RayChannelTimeoutError, RayChannelError, OSError):
                return False
        return True

    def close(self) -> None:
        with self._lock:
            self._channel.close()
            os.close(self._bell)
            self._bell = -1
            if os.path.exists(self._path):  # the reader never came
                os.unlink(self._path)


class ChannelReceiver:
    """A thread that drains the reading end into a callback, until it or the writer is closed."""

    def __init__(self, end: ReadingEnd, on_message: Callable[[Any], None]) -> None:
        end.channel.ensure_registered_as_reader()
        self._channel = end.channel
        self._bell = os.open(end.bell, os.O_RDONLY | os.O_NONBLOCK)
        os.unlink(end.bell)
        self._on_message = on_message
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._drain, name="d3d-link", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while not self._is_closed.is_set():
                if not select.select([self._bell], [], [], _READ_TIMEOUT_S)[0]:
                    continue
                rings = os.read(self._bell, 4096)
                if not rings:
                    return
                for _ in rings:
                    self._on_message(pickle.loads(self._channel.read(timeout=_READ_TIMEOUT_S)))
        except (RayChannelError, RayChannelTimeoutError):
            return  # the channel broke with its writer
        finally:
            os.close(self._bell)

    def close(self) -> None:
        self._is_closed.set()
        self._channel.close()
        self._thread.join(timeout=2 * _READ_TIMEOUT_S)


def has_channels() -> bool:
    """Whether this Ray still has the shared-memory channel."""
    try:
        from ray.experimental.channel import BufferedSharedMemoryChannel  # noqa: F401
    except ImportError:
        return False
    return True
