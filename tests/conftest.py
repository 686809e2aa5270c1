"""Settings that must stand before torch and Ray are imported, and the one Ray cluster."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Otherwise Ray writes a token to ~/.ray.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of 8 logical CPUs on this machine, for the whole test run."""
    import ray  # Takes seconds; most tests do without.

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200_000_000,
        logging_level="error",
        log_to_driver=False,
    )
    yield
    ray.shutdown()
