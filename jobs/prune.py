"""Remove the least useful layers of a trained drafter, one after another, healing in between.

python jobs/prune.py --config smollm2-cpu drafter=checkpoints/a/drafter output=checkpoints/pruned
python jobs/prune.py --config smollm2-cpu … stop.depth=20
python jobs/prune.py --config smollm2-cpu … stop.depth=18 --resume

Ctrl-C and SIGTERM keep what is done, and --resume goes on. Exits with 0 when the wanted size is
reached, 1 when something failed, 2 on bad input, 130 and 143 on the signals.
"""

import functools
import logging
import os
import signal
import sys
from collections.abc import Sequence

from d3d_ray.command_line import Parser, run_job
from d3d_ray.pruning.config import PruningConfig, list_recipes, load_pruning_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, call, close; the exit code."""
    return run_job(_prune, arguments, interrupted="interrupted: go on with --resume")


def _prune(arguments: Sequence[str]) -> int:
    parser = Parser(description="Prune a drafter.")
    add = parser.add_argument
    add("--config", required=True, help=f"YAML file, or {', '.join(list_recipes())}")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="such as stop.depth=20")
    add("--resume", action="store_true", help="go on with the run in the output folder")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # A shell's background jobs ignore SIGINT unless they say otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run(load_pruning_config(options.config, options.overrides), resume=options.resume)
    return 0


def run(config: PruningConfig, *, resume: bool) -> None:
    # Threads that spin at barriers slow a step tenfold when another process needs a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # These take seconds to import; bad arguments are refused before.
    from d3d_ray.pruning.healing import heal
    from d3d_ray.pruning.pruner import prune

    prune(config, functools.partial(heal, launcher=config.launcher), resume=resume)


if __name__ == "__main__":
    sys.exit(main())
