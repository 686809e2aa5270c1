"""What this machine can do, read off files of the system; loads nothing heavy."""

from pathlib import Path

_GPUS = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
"""Device files of NVIDIA's and AMD's drivers, and of a GPU seen through WSL."""
_BFLOAT16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Of x86 (the first two) and of Arm."""


def has_fast_bfloat16(root: Path = Path("/")) -> bool:
    """Whether there is a GPU, or a CPU with instructions for bfloat16.

    Other CPUs widen every number, which took eight times as long as float32 where it was measured.
    """
    if any((root / name).exists() for name in _GPUS):
        return True
    cpuinfo = root / "proc/cpuinfo"
    if not cpuinfo.is_file():
        return False
    return any(
        not _BFLOAT16_FLAGS.isdisjoint(line.partition(":")[2].split())
        for line in cpuinfo.read_text(encoding="utf-8").splitlines()
        if line.startswith(("flags", "Features"))
    )
