"""Answer prompts, or compare plain, synchronous and asynchronous decoding on them.

python jobs/generate.py --prompt "Why is the sky blue?"
python jobs/generate.py --prompts jobs/demo_prompts.jsonl --mode compare --timeline out.png
"""

import os
import sys
import warnings
from collections.abc import Sequence

from d3d_ray.bench.options import Options, parse_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, call, close; the exit code."""
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        return run(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def run(options: Options) -> int:
    silence()
    config = options.config
    print(f"starting {config.name} ({config.target.source})", file=sys.stderr)
    # These take seconds to import; bad arguments are refused before.
    from d3d_ray.bench.generation import generate
    from d3d_ray.runtime.engine import Engine

    with Engine(config) as engine:
        return generate(engine, options)


def silence() -> None:
    """No progress bars and hints of the libraries; set before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
