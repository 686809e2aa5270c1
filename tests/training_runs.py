"""A small run of the trainer: its target, its answers and its settings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MASK

from d3d_ray.settings import build
from d3d_ray.training.config import TrainingConfig


def write_answers(file: Path) -> None:
    """60 documents of random tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(4, 512, (count,), generator=generator).tolist()

    lines = [
        json.dumps({"id": f"a/{i}", "prompt_ids": draw(3, 6), "answer_ids": draw(5, 30)})
        for i in range(60)
    ]
    file.write_text("\n".join(lines) + "\n")


def make_config(target: Path, files: Path, output: Path, **changes: Any) -> TrainingConfig:
    """fp32, 20 steps of two rows, without evaluation; ``changes`` by section."""
    data: dict[str, Any] = {
        "output": str(output),
        "checkpoint_every": 1000,
        "target": {"source": str(target), "dtype": "float32"},
        "drafter": {"block_size": 4, "mask_token_id": MASK},
        "data": {"files": str(files), "row_tokens": 64, "num_anchors": 8, "heldout_share": 0.1},
        "optimiser": {"num_steps": 20, "accumulation": 2, "dtype": "float32"},
        "evaluation": {"every": None},
    }
    for name, value in changes.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return build(TrainingConfig, data)


def read_metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without what depends on the machine."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "tokens_per_second"} for x in lines]


def as_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a worker. Its process group stays, since DeepSpeed remembers it."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
