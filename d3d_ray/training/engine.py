"""The optimisation: a DeepSpeed engine around the drafter's loss. The only file that imports it."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# DeepSpeed looks for its accelerator when it is imported; see `prepare_process`.
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn

from d3d_ray.models.cpu import keep_freed_memory, return_freed_memory
from d3d_ray.training.config import OptimiserConfig, TrainingConfig
from d3d_ray.training.layout import TrainingRow

_TAG = "state"
_MIN_DECAYED_DIMS = 2
_STEPS_PER_RETURN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Means over the rows of all workers."""

    total: float
    denoising: float
    autoregressive: float
    by_draft: list[float]
    """nan where no row had that draft."""
    gradient_norm: float
    learning_rate: float


class TrainingEngine:
    """The sharded weights and their optimizer. Every method is called by all workers alike.

    ``module`` maps a row to ``Losses``; its ``network`` is the drafter.
    """

    def __init__(self, module: nn.Module, config: TrainingConfig, device: torch.device) -> None:
        _skip_compilation()
        self.device = device
        self._config = config.optimiser
        self.rank, self.num_workers = dist.get_rank(), dist.get_world_size()
        self._engine, *_ = deepspeed.initialize(
            model=module,
            # Fused on both devices, and without a compiler, unlike DeepSpeed's own.
            optimizer=torch.optim.AdamW(
                _groups(module, config.optimiser),
                lr=config.optimiser.learning_rate,
                betas=(config.optimiser.beta1, config.optimiser.beta2),
                fused=True,
            ),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: schedule(config.optimiser, step)
            ),
            config=deepspeed_config(config),
            dist_init_required=False,
        )

    @property
    def num_trained(self) -> int:
        """Weights that are not frozen."""
        parameters = [p for p in self._engine.module.parameters() if p.requires_grad]
        return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)

    def step(self, rows: Sequence[TrainingRow]) -> StepResult:
        """One update from this worker's rows."""
        assert len(rows) == self._config.accumulation
        self._engine.train()
        learning_rate = float(self._engine.get_lr()[0])
        parts = []
        for row in rows:
            losses = self._engine(row.to(self.device))
            self._engine.backward(losses[0])
            self._engine.step()
            parts.append(torch.cat([loss.detach().float().reshape(-1) for loss in losses]))
        total, denoising, autoregressive, *by_draft = self._mean(torch.stack(parts))
        norm = self._engine.get_global_grad_norm()
        if self._engine.global_steps % _STEPS_PER_RETURN == 0:
            return_freed_memory()
        return StepResult(
            total=total,
            denoising=denoising,
            autoregressive=autoregressive,
            by_draft=by_draft,
            gradient_norm=math.nan if norm is None else float(norm),
            learning_rate=learning_rate,
        )

    def _mean(self, parts: torch.Tensor) -> list[float]:  # [rows, figures]
        is_there = ~parts.isnan()
        sums = torch.stack([parts.nan_to_num().sum(dim=0), is_there.float().sum(dim=0)])
        dist.all_reduce(sums)
        means: list[float] = (sums[0] / sums[1]).tolist()
        return means

    def save(self, folder: Path, client_state: dict[str, Any]) -> None:
        """Write this worker's shards, and once what is common to all."""
        self._engine.save_checkpoint(
            str(folder), tag=_TAG, client_state=client_state, save_latest=False
        )

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore weights, optimizer and schedule; returns the client state."""
        path, client_state = self._engine.load_checkpoint(str(folder), tag=_TAG)
        if path is None:
            raise ValueError(f"DeepSpeed finds no checkpoint in {folder}")
        state: dict[str, Any] = client_state
        return state

    def gather(self) -> dict[str, torch.Tensor]:
        """The drafter's weights, whole and on the CPU; empty but on the first worker.

        Tied weights are one tensor under two names.
        """
        state: dict[str, torch.Tensor] = {}
        copies: dict[int, torch.Tensor] = {}
        network = self._engine.module.network
        for name, parameter in network.named_parameters(remove_duplicate=False):
            is_sharded = self._config.zero_stage == 3
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_sharded):
                if self.rank == 0:
                    if id(parameter) not in copies:
                        copies[id(parameter)] = parameter.detach().to("cpu", copy=True)
                    state[name] = copies[id(parameter)]
        return state


def deepspeed_config(config: TrainingConfig) -> dict[str, Any]:
    """What DeepSpeed is told; optimizer and schedule are handed over as objects."""
    optimiser = config.optimiser
    zero: dict[str, Any] = {"stage": optimiser.zero_stage}
    if optimiser.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": optimiser.accumulation,
        "gradient_clipping": optimiser.clip,
        "zero_optimization": zero,
        # Torch's AdamW is fused on the CPU as well; DeepSpeed's must be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if optimiser.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def schedule(config: OptimiserConfig, step: int) -> float:
    """Share of the peak learning rate in a step, from 0: linear warm-up, then a cosine."""
    num_warmup = max(1, round(config.warmup_share * config.num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup + 1) / max(1, config.num_steps - num_warmup))
    cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.cosine_floor + (1.0 - config.cosine_floor) * cosine


def prepare_process(config: TrainingConfig) -> torch.device:
    """The device of this worker, and the process group, made where no launcher has done so."""
    use_gpu = torch.cuda.is_available() if config.use_gpu is None else config.use_gpu
    if use_gpu and not torch.cuda.is_available():
        raise ValueError("use_gpu is true, but torch finds no GPU: set use_gpu=null")
    if not use_gpu:
        torch.set_num_threads(config.threads)
        keep_freed_memory()
    if not dist.is_initialized():
        backend = "nccl" if use_gpu else "gloo"
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != config.num_workers:
        raise ValueError(
            f"num_workers is {config.num_workers}, but {dist.get_world_size()} were started; "
            "set num_workers, or start as many"
        )
    # DeepSpeed reads these; Ray and its own launcher set them.
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        os.environ.setdefault(name, str(value))
    local_rank = os.environ.setdefault("LOCAL_RANK", "0")
    if not use_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(local_rank) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _groups(module: nn.Module, config: OptimiserConfig) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= _MIN_DECAYED_DIMS]
    others = [p for p in trained if p.dim() < _MIN_DECAYED_DIMS]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _skip_compilation() -> None:
    # Otherwise the first run on a CPU compiles an extension, which needs a C++ compiler and 40 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
