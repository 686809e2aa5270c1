"""The training loop under Ray Train: one worker a GPU, or CPU workers with gloo."""

import os
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from d3d_ray.config import to_dict
from d3d_ray.settings import build
from d3d_ray.training.checkpoints import list_checkpoints
from d3d_ray.training.config import TrainingConfig
from d3d_ray.training.outputs import check_output
from d3d_ray.training.process import choose_accelerator
from d3d_ray.training.recording import Figures

_ENVIRONMENT = ("OMP_WAIT_POLICY", "HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY")


def train_on_ray(config: TrainingConfig, *, resume: bool) -> None:
    """Train with ``num_workers`` workers on the cluster, which is started when there is none.

    The output folder must be on storage that all nodes see: every worker writes its shards of a
    checkpoint there. Workers that fail are started again up to ``max_failures`` times, from the
    last checkpoint; then the error is raised.
    """
    check_output(config, resume=resume)
    use_gpu = torch.cuda.is_available() if config.use_gpu is None else config.use_gpu
    resources = {"GPU": 1.0} if use_gpu else {"CPU": float(config.threads)}
    output = Path(config.output).absolute()
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    if not ray.is_initialized():
        ray.init(include_dashboard=False, runtime_env={"env_vars": environment})
    trainer = TorchTrainer(
        _work,
        train_loop_config={
            "config": {**to_dict(config), "output": str(output), "use_gpu": use_gpu},
            "resume": resume,
        },
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=config.num_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=RunConfig(
            storage_path=str(output / "ray"),
            failure_config=FailureConfig(max_failures=config.max_failures),
        ),
    )
    trainer.fit()


def _work(arguments: dict[str, Any]) -> None:
    config = build(TrainingConfig, arguments["config"])
    choose_accelerator(config)
    # DeepSpeed is imported here, after its accelerator is chosen.
    from d3d_ray.training.trainer import train

    def report(step: int, figures: Figures) -> None:
        # A report waits for the controller, which looks every second or two.
        is_due = step % config.checkpoint_every == 0 or step == config.optimiser.num_steps
        if is_due or "teacher_forced" in figures:
            ray.train.report({"step": step, **figures})

    # A restarted worker finds the checkpoints of the attempt before it.
    has_begun = bool(list_checkpoints(Path(config.output) / "checkpoints"))
    train(config, resume=arguments["resume"] or has_begun, on_figures=report)
