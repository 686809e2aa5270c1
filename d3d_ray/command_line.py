"""What the command lines of the jobs have in common. It loads nothing heavy."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Raises ``ValueError`` on bad arguments, as every other check of a job's input does."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def run_job(
    job: Callable[[Sequence[str]], int],
    arguments: Sequence[str] | None,
    *,
    interrupted: str = "interrupted",
) -> int:
    """The exit code of ``job(arguments)``: 2 for bad input, 1 for a failure, 130 for Ctrl-C.

    ``arguments=None`` takes those of the process. An error is one line on stderr.
    """
    silence()
    try:
        return job(sys.argv[1:] if arguments is None else arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130


def silence() -> None:
    """No progress bars and hints of the libraries; set before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning)
