"""Metrics as they come: a JSONL file, TensorBoard, Weights & Biases when asked, and a picture."""

import hashlib
import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from d3d_ray.training.config import TrainingConfig

_METRICS = "metrics.jsonl"
_LENGTHS = (
    "served_sync",
    "served_async",
    "served_dflash",
    "teacher_forced",
    "teacher_forced_mask_first",
)

Figures = Mapping[str, float | Sequence[float] | bool]


class Recorder:
    """Writes to the output folder. What was recorded behind ``last_step`` is dropped first.

    Raises ``ValueError`` when Weights & Biases is asked for and not installed.
    """

    def __init__(self, config: TrainingConfig, *, last_step: int) -> None:
        self._folder = Path(config.output)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._wandb = None if config.wandb is None else _start_wandb(config)
        _drop_behind(self._folder / _METRICS, last_step)
        self._file = (self._folder / _METRICS).open("a", encoding="utf-8")
        self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=last_step + 1)

    def record(self, step: int, figures: Figures) -> None:
        line = {"step": step, **{name: _finite(value) for name, value in figures.items()}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        scalars = _flatten(figures)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        """Draw the learning curve and close the files."""
        self._file.close()
        self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
        draw_curves(self._folder / _METRICS, self._folder / "learning_curve.png")


def draw_curves(metrics: Path, picture: Path) -> None:
    """Losses over the steps, and the acceptance lengths beside them."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, lengths = figure.subplots(1, 2)
    for name in ("denoising", "autoregressive"):
        losses.plot(*_series(lines, name), label=name, linewidth=1)
    losses.set(xlabel="step", ylabel="cross-entropy", title="loss")
    for name in _LENGTHS:
        lengths.plot(*_series(lines, name), label=name.replace("_", " "), marker="o", markersize=3)
    lengths.set(xlabel="step", ylabel="tokens a round", title="acceptance length, held out")
    for axes in (losses, lengths):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=110)


def _series(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _drop_behind(file: Path, last_step: int) -> None:
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    # The last line may have been cut off with its process.
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole if json.loads(line)["step"] <= last_step]
    fresh = file.with_suffix(".partial")
    fresh.write_text("".join(kept), encoding="utf-8")
    os.replace(fresh, file)


def _flatten(figures: Figures) -> dict[str, float]:
    scalars: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, bool | int | float):
            scalars[name] = float(value)
        else:
            scalars |= {f"{name}/{index}": float(v) for index, v in enumerate(value)}
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def _finite(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, Sequence):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None


def _start_wandb(config: TrainingConfig) -> Any:
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise ValueError("wandb is set, but not installed: pip install wandb") from error
    id_ = hashlib.sha256(str(Path(config.output).absolute()).encode()).hexdigest()[:16]
    return wandb.init(project=config.wandb, dir=config.output, id=id_, resume="allow")
