"""A short training run in a process of its own, which gives its memory back when it ends."""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from d3d_ray.config import to_yaml
from d3d_ray.training.checkpoints import list_checkpoints
from d3d_ray.training.config import TrainingConfig, load_training_config

_PATIENCE_S = 120.0
"""For the trainer to finish its step and write a checkpoint when the run is stopped."""


def heal(config: TrainingConfig, launcher: str) -> None:
    """Train to the end, from the newest checkpoint where there is one.

    Raises ``ValueError`` when the trainer refuses its settings and ``RuntimeError`` when it fails;
    its own words are on stderr. When this process is stopped, the trainer writes a checkpoint and
    ends; a second signal kills it.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    file = output.with_suffix(".yaml")
    file.write_text(to_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "d3d_ray.pruning.healing", str(file), "--launcher", launcher]
    if list_checkpoints(output / "checkpoints"):
        command.append("--resume")
    # Its own session: Ctrl-C in a terminal reaches this process only, which passes it on. The pipe
    # tells it when this process is gone, however it went.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        code = child.wait()
    finally:
        _end(child)
    if code == 2:
        raise ValueError(f"the trainer refuses the settings in {file}; its reason is above")
    if code != 0:
        raise RuntimeError(f"healing in {output} failed with exit code {code}; see above")


def _end(child: "subprocess.Popen[bytes]") -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_PATIENCE_S)
    finally:
        child.kill()
        child.wait()


def main() -> int:
    """The trainer's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--launcher", choices=("none", "ray"), required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s   %(message)s")
    threading.Thread(target=_follow_parent, daemon=True).start()
    config = load_training_config(options.file)
    try:
        if options.launcher == "ray":
            from d3d_ray.training.ray_train import train_on_ray

            train_on_ray(config, resume=options.resume)
            return 0
        from d3d_ray.training.process import train_here

        return train_here(config, resume=options.resume)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _follow_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
