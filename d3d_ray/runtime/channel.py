"""The shared-memory transport: a channel of Ray's object store, and a bell to wake its reader.

A blocking read of such a channel spins, which on two cores takes one from the models, and nothing
wakes the reader when the writer dies. So the reader sleeps on a pipe: the writer puts a message
into the channel and then a byte into the pipe, which breaks when the writer dies.
"""

import os
import pickle
import re
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayChannelError, RayChannelTimeoutError

from d3d_ray.runtime.links import NUM_BUFFERS, CallSender, Sender

BUFFER_BYTES = 1 << 20
"""Room for a prompt of about 200,000 tokens; a longer one makes the channel grow."""
_READ_TIMEOUT_S = 0.5
_SEMAPHORE = re.compile(r"/dev/shm/sem\.(?:hdr|obj)\d+-\d+$")


@dataclass(frozen=True, slots=True)
class ReadingEnd:
    """What the writer hands to the reader, on the same node."""

    channel: Any
    bell: str
    """Where /proc shows the pipe; unlike a named one it leaves nothing when its maker is killed."""


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
        # The end for reading stays open here, too, so that the reader may come at any time.
        self._bell_end, self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()

    @property
    def reading_end(self) -> ReadingEnd:
        return ReadingEnd(self._channel, f"/proc/{os.getpid()}/fd/{self._bell_end}")

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
            if self._bell < 0:
                return
            self._channel.close()
            os.close(self._bell)
            os.close(self._bell_end)
            self._bell = -1


class ChannelReceiver:
    """A thread that drains the reading end into a callback, until it or the writer is closed."""

    def __init__(self, end: ReadingEnd, on_message: Callable[[Any], None]) -> None:
        end.channel.ensure_registered_as_reader()
        _unlink_semaphores()
        self._channel = end.channel
        self._bell = os.open(end.bell, os.O_RDONLY | os.O_NONBLOCK)
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


def open_sender(peer: Any, peer_node_id: str | None) -> tuple[Sender, ReadingEnd | None]:
    """The writing end towards ``peer`` and its counterpart: calls when no node id is given."""
    if peer_node_id is None:
        return CallSender(peer), None
    sender = ChannelSender(peer, peer_node_id)
    return sender, sender.reading_end


def _unlink_semaphores() -> None:
    """Take the names from the semaphores of this process's channels, which both ends hold by now.

    Ray never does, and each link would leave 16 files in /dev/shm for good.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name := _SEMAPHORE.search(line):
            Path(name[0]).unlink(missing_ok=True)


def has_channels() -> bool:
    """Whether this Ray still has the shared-memory channel."""
    try:
        from ray.experimental.channel import BufferedSharedMemoryChannel  # noqa: F401
    except ImportError:
        return False
    return True
