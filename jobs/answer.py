"""Let the target answer prompts: Parquet rows of token ids to train a drafter on.

python jobs/answer.py --prompts questions.jsonl --out answers
python jobs/answer.py --preset qwen3-8b --prompts *.jsonl --templates templates.json \\
    --thinking off --temperature 0.7 --top-log-probs 16 --workers 8 --out answers

python jobs/answer.py --score answers/*.jsonl.gz --top-log-probs 8 --out scored

Only the first turn of a prompt is asked. Ctrl-C keeps what is written, and the same command goes
on. Exits with 0 when all is answered, 1 when something failed, 2 on bad input, 130 on Ctrl-C.
"""

import sys
from collections.abc import Sequence

from d3d_ray.command_line import run_job
from d3d_ray.training.answer_options import parse_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, build, call, close; the exit code."""
    return run_job(answer, arguments, interrupted="interrupted: the same command goes on from here")


def answer(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    # This takes seconds to import; bad arguments are refused before.
    from d3d_ray.training.answers_run import answer_all

    answer_all(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
