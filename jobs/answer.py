"""Let the target answer prompts: Parquet rows of token ids to train a drafter on.

python jobs/answer.py --prompts questions.jsonl --out answers
python jobs/answer.py --preset qwen3-8b --prompts *.jsonl --templates templates.json \\
    --thinking off --temperature 0.7 --top-log-probs 16 --workers 8 --out answers

Only the first turn of a prompt is asked. Ctrl-C keeps what is written, and the same command goes
on. Exits with 0 when all is answered, 1 when something failed, 2 on bad input, 130 on Ctrl-C.
"""

import os
import sys
import warnings
from collections.abc import Sequence

from d3d_ray.training.answer_options import parse_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, call, close; the exit code."""
    try:
        options = parse_options(sys.argv[1:] if arguments is None else arguments)
        silence()
        # This takes seconds to import; bad arguments are refused before.
        from d3d_ray.training.answers_run import answer_all

        answer_all(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def silence() -> None:
    """No progress bars and hints of the libraries; set before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
