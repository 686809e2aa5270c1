"""A run whose workers are plain processes: this one alone, or those of DeepSpeed's launcher."""

import os
import signal
import sys
import types

from d3d_ray.training.config import TrainingConfig


def train_here(config: TrainingConfig, *, resume: bool) -> int:
    """Train in this process; the exit code, 130 or 143 when a signal ended it.

    At SIGINT and SIGTERM the step is finished and a checkpoint is written; a second signal ends
    the process at once.
    """
    choose_accelerator(config)
    from d3d_ray.training.trainer import Interrupted, train

    received: list[int] = []

    def note(number: int, frame: types.FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    try:
        train(config, resume=resume, should_stop=lambda: bool(received))
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 128 + (received[0] if received else signal.SIGTERM)
    return 0


def choose_accelerator(config: TrainingConfig) -> None:
    """DeepSpeed takes what it finds when it is imported, unless it is told before."""
    import torch

    if config.use_gpu is False or not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
