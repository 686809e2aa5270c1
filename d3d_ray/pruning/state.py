"""Where a run stands: one JSON file, written anew after every finished step."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d3d_ray.config import to_dict
from d3d_ray.pruning.anchors import Tally
from d3d_ray.pruning.config import PruningConfig

FILE = "pruning.json"

_FREE = (
    "stop.",
    "output",
    "layers_per_round",
    "num_confirmed",
    "threads",
    "use_gpu",
    "checkpoint_every",
    "log_every",
)
"""Settings that may change when a run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """A drafter of some depth, healed, and how it came to be. All tallies are paired."""

    layers: list[int]
    """Which layers of the original checkpoint are left."""
    removed: list[int]
    """Those that were removed last."""
    unhealed: Tally
    healed: Tally
    control: Tally | None
    """The unpruned drafter after the same training; None without one."""
    pass_ms: float
    ranking: list[float] = field(default_factory=list)
    """Acceptance length without each layer that was there, on the anchors of the ranking."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(slots=True, kw_only=True)
class Round:
    """What is done of the round under way."""

    ranking: list[Tally] = field(default_factory=list)
    """Without each layer, in their order."""
    confirmed: list[Tally] = field(default_factory=list)
    """Without each of the best, in the order of the ranking."""
    removed: list[int] = field(default_factory=list)
    unhealed: Tally | None = None
    healed: Tally | None = None
    control: Tally | None = None
    pass_ms: float = 0.0


@dataclass(slots=True, kw_only=True)
class State:
    fingerprint: str
    """Of the anchors."""
    counts: Tally
    """Of the anchors that measure every depth."""
    depths: list[Depth] = field(default_factory=list)
    """The unpruned drafter first."""
    round: Round = field(default_factory=Round)
    chosen: int | None = None
    """Number of layers of the result, once the run has ended."""

    def save(self, config: PruningConfig) -> None:
        """Whole or not at all."""
        file = Path(config.output) / FILE
        data = {"config": to_dict(config), **dataclasses.asdict(self)}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(data), encoding="utf-8")
        os.replace(partial, file)


def open_folder(config: PruningConfig, *, resume: bool) -> Mapping[str, Any] | None:
    """What is stored of the run that is resumed; None for a new one, whose folder is made.

    Raises ``ValueError`` when folder, settings and ``resume`` do not fit together.
    """
    folder = Path(config.output)
    if not resume:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{folder} is not empty: add --resume to go on with its run, or set output to "
                "another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return None
    file = folder / FILE
    if not file.is_file():
        raise ValueError(f"there is no {file} to resume from; start without --resume")
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        old, new = _flatten(stored["config"]), _flatten(to_dict(config))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error!r}): start anew in another folder") from error
    changed = [name for name in new if new[name] != old.get(name) and not name.startswith(_FREE)]
    if changed:
        raise ValueError(
            f"a resumed run keeps its settings, but {changed[0]} was {old.get(changed[0])!r} and "
            f"is {new[changed[0]]!r} now: set it back, or start anew in another folder"
        )
    return stored


def restore(stored: Mapping[str, Any]) -> State:
    """The state that :meth:`State.save` wrote."""
    return State(
        fingerprint=stored["fingerprint"],
        counts=stored["counts"],
        depths=[Depth(**depth) for depth in stored["depths"]],
        round=Round(**stored["round"]),
    )


def _flatten(data: Mapping[str, Any]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in data.items():
        items = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else None
        flat |= {name: value} if items is None else items
    return flat
