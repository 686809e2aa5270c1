"""Answer prompts, or compare plain, synchronous and asynchronous decoding on them.

python jobs/generate.py --prompt "Why is the sky blue?"
python jobs/generate.py --prompts jobs/demo_prompts.jsonl --mode compare --timeline out.png
"""

import sys
from collections.abc import Sequence

from d3d_ray.bench.options import parse_options
from d3d_ray.command_line import run_job


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, call, close; the exit code."""
    return run_job(run, arguments)


def run(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    config = options.config
    print(f"starting {config.name} ({config.target.source})", file=sys.stderr)
    # These take seconds to import; bad arguments are refused before.
    from d3d_ray.bench.generation import generate
    from d3d_ray.runtime.engine import Engine

    with Engine(config) as engine:
        return generate(engine, options)


if __name__ == "__main__":
    sys.exit(main())
