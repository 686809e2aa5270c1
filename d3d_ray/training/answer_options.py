"""The command line of ``jobs/answer.py``, checked before anything heavy is loaded."""

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from d3d_ray.command_line import Parser
from d3d_ray.config import Dtype, TargetConfig, load_config
from d3d_ray.records import Sampling
from d3d_ray.training.questions import Task, read_tasks, read_templates

_THINKING = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """How prompts are answered. Raises ``ValueError`` on a value out of range."""

    max_tokens: int = 256
    temperature: float = 0.0
    """0 = the likeliest token."""
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """A row draws with a seed of its own, made from this one and the row's name."""
    num_top: int = 0
    """Log-probabilities kept at each answer token; 0 = none."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_top <= 1024:
            raise ValueError(f"top log-probabilities must be 0 to 1024, not {self.num_top}")
        Sampling(seed=self.seed)
        self.sampling("", "")

    def sampling(self, dataset: str, id_: str) -> Sampling:
        """With these parameters the engine gives the row's answer, too."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=_row_seed(self.seed, dataset, id_),
        )


def _row_seed(seed: int, dataset: str, id_: str) -> int:
    """Rows with one seed would draw with the same noise at the same position."""
    text = "\0".join((str(seed), dataset, id_)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to answer, how, and where to put it."""

    target: TargetConfig
    num_gpus: int
    """Of one copy of the target, where there are GPUs."""
    settings: AnswerSettings
    tasks: tuple[Task, ...]
    answered: tuple[str, ...]
    """Files of answers to score, instead of tasks to answer."""
    thinking: bool | None
    """None = what the chat template does by itself."""
    out: Path
    batch_size: int
    num_workers: int

    @property
    def provenance(self) -> dict[str, Any]:
        """What all rows of a folder have in common."""
        own = {"thinking": self.thinking, **asdict(self.settings)}
        return {
            "target": self.target.source,
            "dtype": self.target.dtype,
            "max_context": self.target.max_context,
            **({"scored": True, "num_top": self.settings.num_top} if self.answered else own),
        }


def parse_options(arguments: Sequence[str]) -> Options:
    """Raises ``ValueError`` on whatever is wrong with the arguments; ``--help`` exits."""
    args = _make_parser().parse_args(arguments)
    for name in ("batch_size", "workers", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.score:
        _check_scoring(args)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file: give a folder")
    target, num_gpus = _find_target(args.preset, args.target, args.dtype)
    templates = {} if args.templates is None else read_templates(args.templates)
    return Options(
        target=target,
        num_gpus=num_gpus,
        settings=AnswerSettings(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            num_top=args.top_log_probs,
        ),
        tasks=tuple(read_tasks(args.prompts or (), templates)[: args.limit]),
        answered=tuple(args.score or ()),
        thinking=_THINKING.get(args.thinking, target.enable_thinking),
        out=args.out,
        batch_size=args.batch_size,
        num_workers=args.workers,
    )


def _check_scoring(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` for options that scoring has no use for."""
    if not args.top_log_probs:
        raise ValueError("--score keeps top log-probabilities: say how many with --top-log-probs")
    own = AnswerSettings()
    sampling = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    unused = {"thinking": "default", "templates": None, "limit": None}
    unused |= {name: getattr(own, name) for name in sampling}
    for name, default in unused.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --score: leave it out")


def _find_target(
    preset: str | None, source: str | None, dtype: Literal[Dtype, "auto"] | None
) -> tuple[TargetConfig, int]:
    overrides = [] if dtype is None else [f"target.dtype={dtype}"]
    if source is None:
        config = load_config(preset or "smollm2-cpu", overrides)
        return config.target, config.runtime.verifier_gpus
    target = TargetConfig(source=source)
    return target if dtype is None else replace(target, dtype=dtype), 1


def _make_parser() -> Parser:
    parser = Parser(
        description="Let the target answer prompts, as rows to train a drafter on.",
        epilog="The same command goes on after an interruption; no row is answered twice.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, own = parser.add_argument, AnswerSettings()
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--preset", help="preset or YAML file; None = smollm2-cpu")
    which.add_argument("--target", metavar="SOURCE", help="folder, hub name or embedded:NAME")
    dtypes = ["auto", "bfloat16", "float32", "float16"]
    add("--dtype", choices=dtypes, help="None = the preset's, or bf16")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        metavar="FILE",
        help='JSONL with "id", "dataset" and "turns"; the first turn is asked',
    )
    what.add_argument(
        "--score",
        nargs="+",
        metavar="FILE",
        help="answers that are there, JSONL or Parquet: add the target's top log-probabilities",
    )
    add("--templates", type=Path, metavar="FILE", help='JSON like {"gsm8k": "{turn} Think."}')
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the shards")
    add("--max-tokens", type=int, default=own.max_tokens, help="longest answer")
    add("--temperature", type=float, default=own.temperature, help="0 = the likeliest token")
    add("--top-k", type=int, default=own.top_k, help="draw from the k likeliest; 0 = off")
    add("--top-p", type=float, default=own.top_p, help="draw from this mass; 1 = off")
    add("--seed", type=int, default=own.seed, help="of the draws")
    add("--top-log-probs", type=int, default=own.num_top, metavar="K", help="soft targets kept")
    thinking = [*_THINKING, "default"]
    add("--thinking", choices=thinking, default="default", help="default: as the preset says")
    add("--batch-size", type=int, default=32, help="prompts that run together: one shard")
    add("--workers", type=int, default=1, help="copies of the target; more than 1 run on Ray")
    add("--limit", type=int, metavar="N", help="only the first N prompts; None = all")
    return parser
