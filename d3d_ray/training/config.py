"""All settings of a training run, with the machinery of ``d3d_ray.config``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Literal

from d3d_ray.config import DrafterConfig, TargetConfig, list_presets, read_settings
from d3d_ray.settings import check, make_table

TrainingDtype = Literal["bfloat16", "float32"]

_NOT_FOR_DFLASH = (
    ("drafter", "label_shift"),
    ("data", "seeded_share"),
    ("objective", "ar_weight"),
    ("objective", "soft_weight"),
    ("objective", "draft_vocab_size"),
    ("objective", "train_embeddings"),
    ("objective", "train_head"),
    ("optimiser", "activation_checkpointing"),
)
"""Masks alone are trained, with embeddings and head of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    files: str
    """JSONL, JSONL.gz or Parquet files of answers: paths or globs, separated by commas."""
    row_tokens: int = 4096
    """Clean tokens that are packed into one row, the micro-batch of a worker."""
    num_anchors: int = 256
    """Blocks of masks in one row."""
    seeded_share: float = 0.5
    """Share of blocks with a clean token at the first slot."""
    loop_filter: bool = True
    """Leave out answers in which more than half of the 8-grams are repeated."""
    heldout_share: float = 0.01
    """Share of documents, by a hash of their ids, that are kept for evaluation."""
    shards_in_memory: int = 16
    """Files that are read and shuffled together."""

    def __post_init__(self) -> None:
        check(
            self,
            "data.",
            at_least={
                "row_tokens": 4,
                "num_anchors": 1,
                "seeded_share": 0,
                "heldout_share": 0,
                "shards_in_memory": 1,
            },
            at_most={"seeded_share": 1, "heldout_share": 0.5},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    kind: Literal["d3d", "dflash"] = "d3d"
    """What is trained: this package's drafter, or a DFlash drafter on hidden states."""
    gamma: float | None = None
    """Draft i of a block weighs exp(-i / gamma); null = from the block size."""
    ar_weight: float = 0.5
    """Weight of the next-token loss on the clean tokens of answers."""
    soft_weight: float = 0.0
    """Share of the loss that is against the target's top probabilities, not its token."""
    draft_vocab_size: int | None = None
    """Draft only this many tokens, those that answers use most; null = all, or as the drafter."""
    train_embeddings: bool = False
    """Otherwise frozen; of a drafter made from the target they are not stored again."""
    train_head: bool = False
    """Otherwise frozen. A head that is tied to the embeddings is trained with them."""

    def __post_init__(self) -> None:
        check(
            self,
            "objective.",
            at_least={"ar_weight": 0, "soft_weight": 0, "draft_vocab_size": 8},
            above={"gamma": 0},
            at_most={"soft_weight": 1},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserConfig:
    num_steps: int
    """Updates of the weights; the cosine ends here."""
    accumulation: int = 1
    """Rows of each worker in one step."""
    learning_rate: float = 3e-4
    """At its peak."""
    warmup_share: float = 0.04
    """Of the steps, with a learning rate that rises linearly."""
    cosine_floor: float = 0.1
    """Share of the peak that is left at the end."""
    beta1: float = 0.9
    """Of AdamW."""
    beta2: float = 0.95
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of matrices; norms and the mask embedding have none."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 = no clipping."""
    dtype: TrainingDtype = "bfloat16"
    """Of weights and passes; the optimizer's copy of the weights is fp32."""
    zero_stage: int = 2
    """What DeepSpeed shards over the workers: 1 = optimizer, 2 = and gradients, 3 = and weights."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the memory of the CPU."""
    activation_checkpointing: bool = False
    """Run layers again in the backward pass instead of keeping their activations."""

    def __post_init__(self) -> None:
        ones = ("num_steps", "accumulation", "zero_stage")
        zeros = ("learning_rate", "warmup_share", "cosine_floor", "weight_decay", "clip")
        check(
            self,
            "optimiser.",
            at_least={**dict.fromkeys(ones, 1), **dict.fromkeys(zeros, 0)},
            at_most={**dict.fromkeys(("warmup_share", "cosine_floor"), 1), "zero_stage": 3},
        )
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"optimiser.{name} must be in [0, 1), not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    every: int | None = 200
    """Steps between evaluations on the documents held out; null = never, no target is loaded."""
    num_prompts: int = 8
    """Prompts that are answered through the decode loop."""
    max_tokens: int = 64
    """Longest answer to each of them."""
    num_documents: int = 32
    """Documents on which the drafts are compared with the answers, teacher-forced."""

    def __post_init__(self) -> None:
        counts = ("every", "num_prompts", "max_tokens", "num_documents")
        check(self, "evaluation.", at_least=dict.fromkeys(counts, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Everything a run needs. Raises ``ValueError`` on a value of wrong type or range."""

    output: str
    """Folder of the run, on storage that all workers see."""
    seed: int = 0
    """Of the order of documents and of the anchors."""
    num_workers: int = 1
    """Processes, one a GPU where there are GPUs."""
    use_gpu: bool | None = None
    """null = where there is one."""
    threads: int = 1
    """Torch threads of a worker on the CPU."""
    checkpoint_every: int = 100
    """Steps between checkpoints, each with an export of the drafter; the last two are kept."""
    log_every: int = 1
    """Steps between lines of metrics."""
    max_failures: int = 0
    """Restarts of failed workers from the last checkpoint; under Ray Train only."""
    wandb: str | None = None
    """Project on Weights & Biases; null = none."""
    target: TargetConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimiser: OptimiserConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        counts = ("num_workers", "threads", "checkpoint_every", "log_every")
        check(self, "", at_least={**dict.fromkeys(counts, 1), "max_failures": 0})
        if self.drafter.dtype is not None:
            raise ValueError(
                f"drafter.dtype is {self.drafter.dtype!r}, but training goes by optimiser.dtype; "
                "leave it out"
            )
        if self.objective.kind == "dflash":
            self._check_dflash()

    def _check_dflash(self) -> None:
        """Nothing is ignored in silence."""
        for section, name in _NOT_FOR_DFLASH:
            settings = getattr(self, section)
            default = type(settings).__dataclass_fields__[name].default
            if getattr(settings, name) != default:
                raise ValueError(
                    f"{section}.{name} means nothing for objective.kind=dflash: leave it out"
                )

    @property
    def rows_per_step(self) -> int:
        return self.num_workers * self.optimiser.accumulation


def list_recipes() -> list[str]:
    """Names that :func:`load_training_config` knows."""
    return list_presets(_recipes())


def load_training_config(name_or_path: str, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a recipe or a YAML file, then apply overrides such as ``optimiser.num_steps=100``.

    Raises ``ValueError`` on an unknown recipe or setting (with the nearest known one), a missing
    setting, and a value of wrong type or range.
    """
    return read_settings(TrainingConfig, name_or_path, overrides, presets=_recipes())


def training_table() -> str:
    """The Markdown table of all settings."""
    return make_table(TrainingConfig)


def _recipes() -> Traversable:
    return resources.files("d3d_ray.training") / "recipes"
