"""Checkpoints that are whole or not there: written beside, listed with their hashes, renamed."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

_MANIFEST = "complete.json"
_NUM_KEPT = 2
_PARTIAL = ".partial"


class Savable(Protocol):
    """What a checkpoint is of; see ``engine.TrainingEngine``."""

    def save(self, folder: Path, client_state: dict[str, Any]) -> None: ...

    def load(self, folder: Path) -> dict[str, Any]: ...


def save_checkpoint(root: Path, step: int, engine: Savable, client_state: dict[str, Any]) -> None:
    """Write checkpoint ``step`` under ``root`` and drop older ones; all workers call it."""
    folder = _folder(root, step)
    partial = folder.with_suffix(_PARTIAL)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    engine.save(partial, client_state)
    dist.barrier()
    shares: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, {name: _hash(partial / name) for name in _share(_list(partial))})
    if dist.get_rank() == 0:
        files = {name: digest for share in shares for name, digest in share.items()}
        manifest = {"step": step, "num_workers": dist.get_world_size(), "files": files}
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for old in list_checkpoints(root)[:-_NUM_KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(root: Path, engine: Savable) -> dict[str, Any]:
    """Restore the newest checkpoint under ``root``; returns its client state.

    Raises ``ValueError`` in every worker when there is none, when a file is missing or differs
    from what was written, and for another number of workers. Nothing is changed on disk.
    """
    folder = newest_checkpoint(root)
    manifest = _read_manifest(folder)
    if manifest["num_workers"] != dist.get_world_size():
        raise ValueError(
            f"{folder} was written by {manifest['num_workers']} workers, and there are "
            f"{dist.get_world_size()}; set num_workers={manifest['num_workers']}"
        )
    files: dict[str, str] = manifest["files"]
    faults = [
        name
        for name in _share(sorted(files))
        if not (folder / name).is_file() or _hash(folder / name) != files[name]
    ]
    shares: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, faults)
    damaged = [name for share in shares for name in share]
    if damaged:
        raise ValueError(
            f"{folder} is damaged: {', '.join(damaged)} missing or changed; remove that folder to "
            "resume from the checkpoint before it"
        )
    return engine.load(folder)


def newest_checkpoint(root: Path) -> Path:
    """Raises ``ValueError`` when there is none."""
    folders = list_checkpoints(root)
    if not folders:
        raise ValueError(
            f"there is no whole checkpoint in {root} to resume from; start without --resume"
        )
    return folders[-1]


def list_checkpoints(root: Path) -> list[Path]:
    """Oldest first, without those whose writing was cut off."""
    folders = root.glob("step-*")
    return sorted(folder for folder in folders if folder.suffix != _PARTIAL)


def _folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if not {"num_workers", "files"} <= manifest.keys():
            raise ValueError("it is incomplete")
        assert {"num_workers", "files"} <= manifest.keys()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} is damaged: {_MANIFEST} cannot be read ({error}); remove that folder to "
            "resume from the checkpoint before it"
        ) from error
    return manifest


def _list(folder: Path) -> list[str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(str(file.relative_to(folder)) for file in files)


def _share(names: list[str]) -> list[str]:
    """The files that this worker hashes."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
