"""Where and with what a figure was measured."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "ray", "transformers")
_TIMEOUT_S = 20.0


def describe_environment() -> dict[str, Any]:
    """Versions, machine, date, commit and command, as plain values for JSON."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "gpus": _gpu_names()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join(sys.orig_argv),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    # Asking torch would open a CUDA context in this process, on an actor's device.
    return output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # An installed package may lie inside somebody's repository.
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return output_of("git", "-C", str(root), *describe).strip() or None


def output_of(*command: str) -> str:
    """What a command prints; empty when it is not there or fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout if run.returncode == 0 else ""
