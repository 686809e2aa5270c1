"""Where the two actors run: one bundle of a placement group each."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from d3d_ray.config import RuntimeConfig

_ACTOR_CPUS_BESIDE_GPU = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement group with the verifier's and the drafter's bundles."""

    group: PlacementGroup
    verifier_bundle: int
    drafter_bundle: int
    is_owned: bool

    def options(self, bundle: int) -> dict[str, Any]:
        """Options for an actor that takes the whole bundle."""
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
        needed = config.verifier_gpus + config.drafter_gpus
        if num_gpus >= needed and not config.share_device:
            return [
                {"GPU": config.verifier_gpus, "CPU": _ACTOR_CPUS_BESIDE_GPU},
                {"GPU": config.drafter_gpus, "CPU": _ACTOR_CPUS_BESIDE_GPU},
            ]
        if config.share_device:
            return [{"GPU": 0.5, "CPU": _ACTOR_CPUS_BESIDE_GPU}] * 2
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


def place(config: RuntimeConfig, *, timeout_s: float) -> Placement:
    """Reserve both bundles, on one node if that is possible.

    Raises ``ValueError`` when the cluster is too small, ``TimeoutError`` when it is busy.
    """
    total = ray.cluster_resources()
    wanted = bundles(config, num_gpus=total.get("GPU", 0), num_cpus=total.get("CPU", 0))
    group = placement_group(wanted, strategy="PACK")
    if not group.wait(timeout_seconds=timeout_s):
        remove_placement_group(group)
        raise TimeoutError(
            f"no room for the bundles {wanted} within {timeout_s:g} s; free now: "
            f"{ray.available_resources()}: stop other work on the cluster or add nodes"
        )
    return Placement(group, 0, 1, is_owned=True)


def check_devices(verifier: str, drafter: str, config: RuntimeConfig) -> None:
    """Raise ``ValueError`` when both actors see the same GPU and were not told to share it."""
    if verifier == drafter != "cpu" and not config.share_device:
        raise ValueError(
            f"verifier and drafter both got the GPU {verifier}: let Ray assign the devices (unset "
            "CUDA_VISIBLE_DEVICES and RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES), or set "
            "runtime.share_device=true"
        )
