"""The training loop of one worker; the same under Ray Train, DeepSpeed's launcher and alone."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from d3d_ray.config import to_yaml
from d3d_ray.training.checkpoints import load_checkpoint, save_checkpoint
from d3d_ray.training.config import TrainingConfig
from d3d_ray.training.data import Position, RowStream
from d3d_ray.training.engine import StepResult, TrainingEngine, prepare_process
from d3d_ray.training.layout import TrainingRow, pad_rows
from d3d_ray.training.outputs import Critic, Exporter, check_output, copy_drafter, shape_of
from d3d_ray.training.recording import Figures, Recorder
from d3d_ray.training.setup import load_trained, make_loss

logger = logging.getLogger(__name__)

_ROW_MULTIPLE = 128


class Interrupted(Exception):
    """The run was asked to stop, and has written a checkpoint."""


def train(
    config: TrainingConfig,
    *,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    on_figures: Callable[[int, Figures], None] = lambda step, figures: None,
) -> None:
    """Train to ``optimiser.num_steps``, with checkpoints and exports on the way.

    Every worker calls it, and ``on_figures`` gets the same in each. Raises ``ValueError`` before
    anything is written for settings, data or a checkpoint that are wrong, and
    :class:`Interrupted` when ``should_stop`` in any worker.
    """
    device = prepare_process(config)
    check_output(config, resume=resume)
    trainer = Trainer(config, device, on_figures)
    step = trainer.resume() if resume else 0
    trainer.run(step, should_stop)


class Trainer:
    """One worker's part of a run."""

    def __init__(
        self,
        config: TrainingConfig,
        device: torch.device,
        on_figures: Callable[[int, Figures], None],
    ) -> None:
        self._config = config
        self._on_figures = on_figures
        self._is_first = dist.get_rank() == 0
        self._checkpoints = Path(config.output) / "checkpoints"
        self._recorder: Recorder | None = None
        drafter = load_trained(config, device)
        self._shape = shape_of(drafter)
        self._stream = self._open_stream(None)
        has_critic = config.evaluation.every is not None
        if self._is_first:  # It keeps a second copy of the weights, to serve and to export.
            where = device if has_critic else torch.device("cpu")
            self._copy = copy_drafter(drafter, where)
            self._exporter = Exporter(config, self._copy)
            self._critic = Critic(config, self._copy) if has_critic else None
        self._engine = TrainingEngine(make_loss(drafter, config, device), config, device)
        self._num_rows = self._max_rows() if device.type == "cuda" else 0
        self._saved_step = 0

    def resume(self) -> int:
        """Restore the newest checkpoint; the number of steps done."""
        state = load_checkpoint(self._checkpoints, self._engine)
        if state["rows_per_step"] != self._config.rows_per_step:
            raise ValueError(
                f"the checkpoint has {state['rows_per_step']} rows a step and the settings "
                f"{self._config.rows_per_step}; set optimiser.accumulation as it was"
            )
        self._stream = self._open_stream(Position(**state["position"]))
        self._saved_step = int(state["step"])
        return self._saved_step

    def run(self, step: int, should_stop: Callable[[], bool]) -> None:
        config, num_steps = self._config, self._config.optimiser.num_steps
        self._start_recording(step)
        try:
            if step == num_steps:  # The run may have been killed between checkpoint and export.
                self._export()
            while step < num_steps:
                started = time.monotonic()
                rows, num_tokens = self._take_rows()
                result = self._engine.step(rows)
                step += 1
                seconds = time.monotonic() - started
                if step % config.log_every == 0 or step == num_steps:
                    self._record(step, self._figures(result, num_tokens, seconds))
                is_stopping = _any_worker(should_stop())
                if is_stopping or step % config.checkpoint_every == 0 or step == num_steps:
                    self._save(step)
                if is_stopping and step < num_steps:
                    raise Interrupted(f"stopped after step {step}; go on with --resume")
                every = config.evaluation.every
                if every is not None and (step % every == 0 or step == num_steps):
                    self._evaluate(step)
        finally:
            if self._recorder is not None:
                self._recorder.close()

    def _open_stream(self, position: Position | None) -> RowStream:
        return RowStream(
            self._config.data,
            self._shape,
            seed=self._config.seed,
            with_soft_targets=self._config.objective.soft_weight > 0.0,
            position=position,
        )

    def _start_recording(self, step: int) -> None:
        if not self._is_first:
            return
        self._recorder = Recorder(self._config, last_step=step)
        text = to_yaml(self._config)
        (Path(self._config.output) / "config.yaml").write_text(text, encoding="utf-8")
        logger.info("step %d of %d", step, self._config.optimiser.num_steps)
        logger.info("%.1f M weights are trained", self._engine.num_trained / 1e6)

    def _take_rows(self) -> tuple[list[TrainingRow], int]:
        """This worker's rows of the next step, and the clean tokens of all workers' rows."""
        rows, num_tokens = [], 0
        for index in range(self._config.rows_per_step):
            number = self._stream.position.row
            documents = self._stream.take()
            num_tokens += sum(len(d.prompt) + len(d.answer) for d in documents)
            if index % dist.get_world_size() == dist.get_rank():
                row = self._stream.lay_out(documents, number)
                rows.append(pad_rows(row, self._num_rows) if self._num_rows else row)
        return rows, num_tokens

    def _max_rows(self) -> int:
        data = self._config.data
        num_rows = data.row_tokens + data.num_anchors * self._shape.block_size
        return -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE

    def _figures(self, result: StepResult, num_tokens: int, seconds: float) -> dict[str, Any]:
        figures = asdict(result)
        figures["loss"] = figures.pop("total")
        figures["tokens_per_second"] = num_tokens / seconds
        figures["row"] = self._stream.position.row
        figures["epoch"] = self._stream.position.epoch
        return figures

    def _record(self, step: int, figures: Figures) -> None:
        if self._recorder is not None:
            self._recorder.record(step, figures)
            words = {k: round(v, 4) for k, v in figures.items() if isinstance(v, float)}
            logger.info("step %d %s", step, words)
        self._on_figures(step, figures)

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        state = {
            "step": step,
            "position": asdict(self._stream.position),
            "rows_per_step": self._config.rows_per_step,
        }
        save_checkpoint(self._checkpoints, step, self._engine, state)
        self._saved_step = step
        self._export()

    def _export(self) -> None:
        self._gather()
        if self._is_first:
            self._exporter.export()
        dist.barrier()

    def _evaluate(self, step: int) -> None:
        self._gather()
        figures: list[Figures] = [{}]
        if self._is_first:
            assert self._critic is not None
            figures = [self._critic.judge()]
        dist.broadcast_object_list(figures)
        self._record(step, figures[0])

    def _gather(self) -> None:
        weights = self._engine.gather()
        if self._is_first:
            self._copy.network.load_state_dict(weights, strict=True)


def _any_worker(is_stopping: bool) -> bool:
    if dist.get_backend() == "nccl":
        flag = torch.tensor([int(is_stopping)], device="cuda")
    else:
        flag = torch.tensor([int(is_stopping)])
    dist.all_reduce(flag)
    return bool(flag.item())
