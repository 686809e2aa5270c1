"""The command line of ``jobs/generate.py``: parsed and checked before anything heavy is loaded."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from d3d_ray.bench.prompts import NamedPrompt, make_prompt, read_prompts
from d3d_ray.command_line import Parser
from d3d_ray.config import EngineConfig, load_config
from d3d_ray.records import Mode, Sampling

_COMPARE = "compare"
_DEFAULT_PROMPT = (
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey? Explain step by step."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to generate, how, and what to write."""

    config: EngineConfig
    sampling: Sampling
    prompts: tuple[NamedPrompt, ...]
    modes: tuple[Mode, ...]
    """More than one: compare them."""
    json_file: Path | None = None
    trace_file: Path | None = None
    timeline_file: Path | None = None

    @property
    def is_comparison(self) -> bool:
        return len(self.modes) > 1


def parse_options(arguments: Sequence[str]) -> Options:
    """Raises ``ValueError`` on whatever is wrong with the arguments; ``--help`` exits."""
    args = _make_parser().parse_intermixed_args(arguments)
    overrides = [*args.overrides, *args.set]
    if args.dtype is not None:
        overrides.append(f"target.dtype={args.dtype}")
    if args.simulate_acceptance is not None:
        overrides.append(f"decode.simulate_acceptance={args.simulate_acceptance}")
    if args.mode is not None:
        overrides.append(f"decode.mode={Mode.ASYNC if args.mode == _COMPARE else args.mode}")
    config = load_config(args.preset, overrides)
    return Options(
        config=config,
        sampling=Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            max_tokens=args.max_tokens,
            seed=args.seed,
            ignore_eos=args.ignore_eos,
        ),
        prompts=tuple(
            [make_prompt(args.prompt)] if args.prompts is None else read_prompts(args.prompts)
        ),
        modes=available_modes(config) if args.mode == _COMPARE else (Mode(config.decode.mode),),
        json_file=args.json,
        trace_file=args.trace,
        timeline_file=args.timeline,
    )


def available_modes(config: EngineConfig) -> tuple[Mode, ...]:
    """Those that the settings have a drafter for."""
    has_dflash = config.dflash.source is not None
    return tuple(mode for mode in Mode if mode is not Mode.DFLASH or has_dflash)


def _make_parser() -> Parser:
    parser = Parser(
        description="Answer prompts, or compare the decoding modes on them.",
        epilog="The exit code is 1 when modes differ where they must not, 2 for bad input.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", default="smollm2-cpu", help="preset or YAML file")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL with "id" and "turns"')
    source.add_argument("--prompt", default=_DEFAULT_PROMPT, help="one question")
    add("--mode", choices=[*map(str, Mode), _COMPARE], help="None = the preset's")
    add("--max-tokens", type=int, default=128, help="longest answer")
    add("--temperature", type=float, default=0.0, help="0 = the likeliest token")
    add("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 = off")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this mass")
    add("--seed", type=int, help="of the draws; None = another one every time")
    dtypes = ["auto", "bfloat16", "float32", "float16"]
    add("--dtype", choices=dtypes, help="short for target.dtype")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add("--simulate-acceptance", type=float, metavar="P", help="SIMULATED drafts, right by chance")
    add("--json", type=output_file, metavar="FILE", help="write the figures")
    add("--trace", type=output_file, metavar="FILE", help="write a trace for ui.perfetto.dev")
    add("--timeline", type=output_file, metavar="FILE", help="draw a few rounds as a PNG")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    add("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="the same as --set")
    return parser


def output_file(text: str) -> Path:
    """For argparse: better to refuse now than after an hour of measuring."""
    file = Path(text)
    folder = file.absolute().parent
    if file.is_dir() or not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot write {file}: give a file in a folder that exists"
        )
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {file}: no permission to")
    return file
