"""All settings of a pruning run, with the machinery of ``d3d_ray.config``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from d3d_ray.config import DrafterConfig, TargetConfig, list_presets, read_settings
from d3d_ray.settings import check
from d3d_ray.training.config import (
    DataConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimiserConfig,
    TrainingConfig,
)

_DEFAULT_SHARE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """When to stop: exactly one of the three; none means a share of 0.99."""

    share: float | None = None
    """Keep at least this share of the unpruned drafter's acceptance length."""
    depth: int | None = None
    """Number of layers to end with."""
    pass_ms: float | None = None
    """Longest packed pass, in milliseconds."""

    def __post_init__(self) -> None:
        check(
            self,
            "stop.",
            at_least={"depth": 1},
            above={"share": 0, "pass_ms": 0},
            at_most={"share": 1},
        )
        given = [name for name in ("share", "depth", "pass_ms") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"stop.{given[0]} and stop.{given[1]} are both set: set one of them to null"
            )

    @property
    def min_share(self) -> float | None:
        """None where depth or time decides."""
        has_other = self.depth is not None or self.pass_ms is not None
        return _DEFAULT_SHARE if self.share is None and not has_other else self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorsConfig:
    """The places of held-out answers at which drafts are compared, the same in a whole run."""

    num_ranking: int = 500
    """Anchors on which every remaining layer is ranked."""
    num_confirming: int = 3000
    """Anchors, of other documents, that decide between the best and measure every depth."""
    per_document: int = 48
    """Anchors drawn in one answer."""
    seeded_share: float = 0.5
    """Share of anchors with a known token at the first slot; the others are masks alone."""

    def __post_init__(self) -> None:
        counts = ("num_ranking", "num_confirming", "per_document")
        check(
            self,
            "anchors.",
            at_least={**dict.fromkeys(counts, 1), "seeded_share": 0},
            at_most={"seeded_share": 1},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingConfig:
    """The packed pass that is timed at every depth."""

    num_rows: int = 64
    """Rows of it, those of the block under verification included."""
    num_cached: int = 256
    """Tokens in the cache before it."""
    num_runs: int = 15
    """The median of so many is taken."""
    threads: int = 1
    """Torch threads on the CPU, as in serving."""

    def __post_init__(self) -> None:
        names = ("num_rows", "num_cached", "num_runs", "threads")
        check(self, "timing.", at_least=dict.fromkeys(names, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningConfig:
    """Everything a run needs. Raises ``ValueError`` on a value of wrong type or range."""

    output: str
    """Folder of the run."""
    drafter: str
    """Folder of the trained drafter to start from; it stays as it is."""
    seed: int = 0
    """Of the anchors and of the order of documents in the first healing; each has the next."""
    layers_per_round: int = 1
    """Layers that are removed before each healing."""
    num_confirmed: int = 3
    """The best of the ranking, which are compared on more anchors."""
    with_control: bool = True
    """Give the unpruned drafter the same extra training, at the price of a second healing."""
    launcher: Literal["none", "ray"] = "none"
    """How healing is started: one process, or Ray Train."""
    num_workers: int = 1
    """Processes of a healing; more than one need launcher=ray."""
    use_gpu: bool | None = None
    """null = where there is one."""
    threads: int = 1
    """Torch threads on the CPU, of ranking and of each worker of a healing."""
    checkpoint_every: int = 100
    """Steps of a healing between checkpoints, from which an interrupted one goes on."""
    log_every: int = 10
    """Steps of a healing between lines of metrics."""
    target: TargetConfig
    stop: StopConfig = field(default_factory=StopConfig)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimiser: OptimiserConfig

    def __post_init__(self) -> None:
        counts = ("layers_per_round", "num_confirmed", "num_workers", "threads")
        check(self, "", at_least=dict.fromkeys((*counts, "checkpoint_every", "log_every"), 1))
        if self.num_workers > 1 and self.launcher == "none":
            raise ValueError(f"num_workers is {self.num_workers}: that needs launcher=ray")
        if self.data.heldout_share == 0.0:
            raise ValueError(
                "data.heldout_share is 0.0, but layers are compared on documents held out: give "
                "the share with which the drafter was trained"
            )

    def healing(self, source: Path, output: Path, number: int) -> TrainingConfig:
        """The settings of healing ``number``: the same documents for whatever is healed."""
        return TrainingConfig(
            output=str(output),
            seed=self.seed + number,
            num_workers=self.num_workers,
            use_gpu=self.use_gpu,
            threads=self.threads,
            checkpoint_every=self.checkpoint_every,
            log_every=self.log_every,
            target=self.target,
            drafter=DrafterConfig(source=str(source)),
            data=self.data,
            objective=self.objective,
            optimiser=self.optimiser,
            evaluation=EvaluationConfig(every=None),
        )


def list_recipes() -> list[str]:
    """Names that :func:`load_pruning_config` knows."""
    return list_presets(_recipes())


def load_pruning_config(name_or_path: str, overrides: Sequence[str] = ()) -> PruningConfig:
    """Read a recipe or a YAML file, then apply overrides such as ``stop.depth=20``.

    Raises ``ValueError`` on an unknown recipe or setting (with the nearest known one), a missing
    setting, and a value of wrong type or range.
    """
    return read_settings(PruningConfig, name_or_path, overrides, presets=_recipes())


def _recipes() -> Traversable:
    return resources.files("d3d_ray.pruning") / "recipes"
