"""Train a drafter for a target, from the target's own answers.

python jobs/train.py --config smollm2-cpu data.files='answers/*.jsonl.gz' output=checkpoints/a
python jobs/train.py --config smollm2-cpu output=checkpoints/a --resume
deepspeed --num_gpus 8 jobs/train.py --launcher deepspeed --config qwen3-8b-drafter-1.7b
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from d3d_ray.command_line import Parser, run_job
from d3d_ray.training.config import list_recipes, load_training_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, call, close; the exit code."""
    return run_job(run, arguments)


def run(arguments: Sequence[str]) -> int:
    parser = Parser(description="Train a drafter.")
    add = parser.add_argument
    add("--config", required=True, help=f"YAML file, or {', '.join(list_recipes())}")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="such as optimiser.num_steps=100")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--launcher", choices=("ray", "deepspeed", "none"), default="ray", help="none: one process")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # DeepSpeed's launcher.
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = load_training_config(options.config, options.overrides)
    # Threads that spin at barriers slow a step tenfold when another process needs a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # These take seconds to import; bad arguments are refused before.
    if options.launcher == "ray":
        from d3d_ray.training.ray_train import train_on_ray

        train_on_ray(config, resume=options.resume)
        return 0
    from d3d_ray.training.process import train_here

    return train_here(config, resume=options.resume)


if __name__ == "__main__":
    sys.exit(main())
