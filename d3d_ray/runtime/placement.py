"""Where the two actors run: one bundle of a placement group each."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from d3d_ray.config import RuntimeConfig

_ACTOR_CPUS_BESIDE_GPU = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement group with the verifier's and the drafter's bundles, one for each.

    Raises ``ValueError`` on a bundle that the group has not, or that both shall have.
    """

    group: PlacementGroup
    verifier_bundle: int
    drafter_bundle: int | None
    """None: there is no drafter."""
    is_owned: bool

    def __post_init__(self) -> None:
        num_bundles = len(self.group.bundle_specs)
        for bundle in (self.verifier_bundle, self.drafter_bundle):
            if bundle is not None and not 0 <= bundle < num_bundles:
                raise ValueError(
                    f"the placement group has bundles 0 to {num_bundles - 1}, no {bundle}"
                )
        if self.verifier_bundle == self.drafter_bundle:
            raise ValueError(
                f"verifier and drafter both got bundle {self.verifier_bundle}, and each takes a "
                "whole one: give them one each"
            )

    def options(self, bundle: int | None) -> dict[str, Any]:
        """Options for an actor that takes the whole bundle."""
        if bundle is None:
            return {}
        resources = self.group.bundle_specs[bundle]
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=bundle
            ),
        }

    def remove(self) -> None:
        if self.is_owned:
            remove_placement_group(self.group)


def bundles(config: RuntimeConfig, *, num_gpus: float, num_cpus: float) -> list[dict[str, float]]:
    """The verifier's and the drafter's bundle for a cluster with these resources.

    Raises ``ValueError`` when two devices are needed and only one is there.
    """
    if num_gpus:
        if config.share_device:
            if config.verifier_gpus > 1:
                raise ValueError(
                    "runtime.share_device=true puts both models on one GPU and "
                    f"runtime.verifier_gpus is {config.verifier_gpus}: leave out one of them"
                )
            return [{"GPU": 0.5, "CPU": _ACTOR_CPUS_BESIDE_GPU}] * 2
        needed = config.verifier_gpus + 1
        if num_gpus >= needed:
            return [
                {"GPU": config.verifier_gpus, "CPU": _ACTOR_CPUS_BESIDE_GPU},
                {"GPU": 1, "CPU": _ACTOR_CPUS_BESIDE_GPU},
            ]
        raise ValueError(
            f"verifier and drafter need {needed} GPUs and the cluster has {num_gpus:g}: "
            "add a GPU, or put both on one with runtime.share_device=true"
        )
    needed = config.verifier_cpus + config.drafter_cpus
    if num_cpus >= needed:
        return [{"CPU": config.verifier_cpus}, {"CPU": config.drafter_cpus}]
    if config.share_device:
        return [{"CPU": num_cpus / 2}] * 2
    raise ValueError(
        f"verifier and drafter need {needed} CPU cores and the cluster has {num_cpus:g}: "
        "add cores, lower runtime.verifier_cpus and runtime.drafter_cpus, or let both share one "
        "with runtime.share_device=true"
    )


def place(config: RuntimeConfig, *, has_drafter: bool, timeout_s: float) -> Placement:
    """Reserve both bundles, on one node if that is possible; the verifier's alone if no other.

    Raises ``ValueError`` when the cluster is too small, ``TimeoutError`` when it is busy.
    """
    total = ray.cluster_resources()
    num_gpus, num_cpus = total.get("GPU", 0), total.get("CPU", 0)
    if has_drafter:
        wanted = bundles(config, num_gpus=num_gpus, num_cpus=num_cpus)
    else:
        devices = {"GPU": config.verifier_gpus} if num_gpus else {}
        wanted = [{"CPU": 1 if num_gpus else config.verifier_cpus, **devices}]
    group = placement_group(wanted, strategy="PACK")
    if not group.wait(timeout_seconds=timeout_s):
        remove_placement_group(group)
        raise TimeoutError(
            f"no room for the bundles {wanted} within {timeout_s:g} s; free now: "
            f"{ray.available_resources()}: stop other work on the cluster or add nodes"
        )
    return Placement(group, 0, 1 if has_drafter else None, is_owned=True)


def check_devices(verifier: str, drafter: str, config: RuntimeConfig) -> None:
    """Raise ``ValueError`` when both actors see the same GPU and were not told to share it."""
    if verifier == drafter != "cpu" and not config.share_device:
        raise ValueError(
            f"verifier and drafter both got the GPU {verifier}: let Ray assign the devices (unset "
            "CUDA_VISIBLE_DEVICES and RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES), or set "
            "runtime.share_device=true"
        )


def available_memory() -> int:
    """Bytes of main memory that can still be had, caches that would be given up included."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
