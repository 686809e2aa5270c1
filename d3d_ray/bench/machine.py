"""Checks of this machine: versions, devices, shared memory."""

import os
import platform
from collections.abc import Iterator
from importlib import metadata

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from d3d_ray.bench.check import Check, Status, gigabytes
from d3d_ray.bench.environment import output_of
from d3d_ray.runtime.channel import BUFFER_BYTES
from d3d_ray.runtime.links import NUM_BUFFERS

_PACKAGE = "d3d-ray"
_SHOWN = ("torch", "ray", "transformers")


def check_versions() -> Iterator[Check]:
    """Python and the installed packages against what this package asks for."""
    try:
        wanted = metadata.metadata(_PACKAGE)
    except metadata.PackageNotFoundError:
        text = "d3d-ray is not installed, so its requirements are unknown: run pip install -e ."
        yield Check(name="versions", status=Status.WARN, text=text)
        return
    requirements = [Requirement(line) for line in metadata.requires(_PACKAGE) or ()]
    installed: dict[str, str] = {"python": platform.python_version()}
    faults = [fault_of_python(installed["python"], wanted["Requires-Python"] or "")]
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed[requirement.name] = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            installed[requirement.name] = ""
        faults.append(fault_of_package(requirement, installed[requirement.name]))
    found = [fault for fault in faults if fault is not None]
    shown = ", ".join(f"{name} {installed.get(name)}" for name in ("python", *_SHOWN))
    if not found:
        yield Check(name="versions", status=Status.OK, text=shown, data={"installed": installed})
    for status, text in found:
        yield Check(name="versions", status=status, text=text, data={"installed": installed})


def fault_of_python(version: str, wanted: str) -> tuple[Status, str] | None:
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return None
    return Status.FAIL, f"Python {version} is not {wanted}: make a new environment"


def fault_of_package(requirement: Requirement, version: str) -> tuple[Status, str] | None:
    """A missing package fails; another version than asked for may work, and is warned of."""
    remedy = f"run pip install '{requirement}'"
    if not version:
        return Status.FAIL, f"{requirement.name} is not installed: {remedy}"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return (
        Status.WARN,
        f"{requirement.name} is {version}, tested with {requirement.specifier}: {remedy}",
    )


def check_devices_here() -> Check:
    """The GPUs of this machine, or its cores."""
    # Asked of nvidia-smi: torch might open a CUDA context here, on an actor's device.
    query = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpus = output_of("nvidia-smi", *query).splitlines()
    num_cores = len(os.sched_getaffinity(0))
    num_seen = torch.cuda.device_count()
    data = {"gpus": gpus, "num_seen": num_seen, "cuda": torch.version.cuda, "cores": num_cores}
    if num_seen:
        names = "; ".join(gpus) or "no nvidia-smi"
        text = f"{num_seen} GPUs for torch (CUDA {torch.version.cuda}): {names}"
        return Check(name="devices", status=Status.OK, text=text, data=data)
    if gpus:
        why = "has no CUDA" if torch.version.cuda is None else f"has CUDA {torch.version.cuda}"
        text = (
            f"torch sees none of {len(gpus)} GPUs ({'; '.join(gpus)}): torch {torch.__version__} "
            f"{why}; install the torch build for this driver, or check CUDA_VISIBLE_DEVICES"
        )
        return Check(name="devices", status=Status.WARN, text=text, data=data)
    text = f"no GPU: CPU with {num_cores} cores"
    return Check(name="devices", status=Status.OK, text=text, data=data)


def check_shared_memory(free_bytes: int, store_bytes: int) -> Check:
    """Ray keeps its object store and the links in /dev/shm; in a file elsewhere they are slow."""
    needed = store_bytes + 2 * NUM_BUFFERS * BUFFER_BYTES
    data = {"free_bytes": free_bytes, "needed_bytes": needed}
    text = (
        f"/dev/shm has {gigabytes(free_bytes)} free, Ray's object store takes {gigabytes(needed)}"
    )
    if free_bytes >= needed:
        return Check(name="shm", status=Status.OK, text=text, data=data)
    text += (
        f": every hop may go through a file; give the container --shm-size={-(-needed // 10**9)}g "
        f"(Kubernetes: an emptyDir with medium Memory on /dev/shm), or start Ray with a smaller "
        f"object store"
    )
    return Check(name="shm", status=Status.WARN, text=text, data=data)
