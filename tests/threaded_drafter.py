"""A drafter in a thread of its own, with delays: the real worker, without Ray."""

import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from d3d_ray.decode.drafting import DraftWorker
from d3d_ray.decode.plans import DraftPlan, Offer, Work
from d3d_ray.records import FromDrafter, Table, ToDrafter


class DelayedPlan:
    """Another plan, after a random delay of up to ``max_delay_s``."""

    def __init__(self, plan: DraftPlan, max_delay_s: float, seed: int) -> None:
        self._plan = plan
        self._max_delay_s = max_delay_s
        self._rng = random.Random(seed)

    def passes(self, work: Work) -> Iterator[Offer]:
        for offer in self._plan.passes(work):
            time.sleep(self._rng.random() * self._max_delay_s)
            yield offer

    def free(self, request: str) -> None:
        self._plan.free(request)


class ThreadedDrafter:
    """A ``Drafter``; use it as a context manager."""

    def __init__(self, plan: DraftPlan) -> None:
        self._arrived: queue.Queue[FromDrafter] = queue.Queue()
        self.worker = DraftWorker(plan, self._take)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> "ThreadedDrafter":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_stopped.set()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def send(self, message: ToDrafter) -> bool:
        self.worker.receive(message)
        return True

    def poll(self, timeout: float) -> list[FromDrafter]:
        try:
            messages = [self._arrived.get(timeout=max(timeout, 1e-6))]
            while not self._arrived.empty():
                messages.append(self._arrived.get_nowait())
        except queue.Empty:
            return []
        return messages

    def _take(self, message: FromDrafter) -> bool:
        if isinstance(message, Table):
            message = replace(message, arrived_ns=time.monotonic_ns())
        self._arrived.put(message)
        return True

    def _work(self) -> None:
        while not self._is_stopped.is_set():
            self.worker.step(0.01)
