"""Training with two workers under Ray Train; in-process runs are the reference."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
import torch
from safetensors.torch import load_file
from tiny import save_tiny
from training_runs import as_worker, make_config, read_metrics, write_answers

from d3d_ray.config import to_yaml
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.training.checkpoints import list_checkpoints

ROOT = Path(__file__).parents[1]

# Minutes each on two cores, so not in the normal run.
pytestmark = [pytest.mark.ray, pytest.mark.soak]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray_train")
    save_tiny(folder / "target", "llama", tie_word_embeddings=True)
    write_answers(folder / "a.jsonl")
    return folder


@pytest.mark.parametrize(("stage", "dtype"), [(2, "float32"), (3, "bfloat16")])
def test_two_workers_train_save_resume_and_export(
    ray_cluster: None, folder: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    from d3d_ray.training.ray_train import train_on_ray

    config = make_config(
        folder / "target",
        folder / "a.jsonl",
        tmp_path / "run",
        num_workers=2,
        checkpoint_every=3,
        optimiser={"num_steps": 6, "accumulation": 1, "zero_stage": stage, "dtype": dtype},
    )
    half = replace(config, optimiser=replace(config.optimiser, num_steps=3))
    train_on_ray(half, resume=False)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    manifest = json.loads((checkpoint / "complete.json").read_text())
    assert manifest["num_workers"] == 2
    assert sum("optim_states" in name for name in manifest["files"]) == 2
    train_on_ray(config, resume=True)
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["row"] for line in lines] == [2, 4, 6, 8, 10, 12]
    drafter = load_drafter(
        str(tmp_path / "run" / "drafter"),
        target_source=str(folder / "target"),
        dtype=getattr(torch, dtype),
        device="cpu",
    )
    stored = load_file(tmp_path / "run" / "drafter" / "model.safetensors")
    state = drafter.network.state_dict()
    for name, tensor in stored.items():
        key = name if name == "mask_embedding" else f"model.{name}"
        assert torch.equal(tensor, state[key])
        assert tensor.dtype == getattr(torch, dtype) and bool(tensor.any())
    table = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    for name in ("model.model.embed_tokens.weight", "model.lm_head.weight"):
        assert torch.equal(state[name], table.to(state[name].dtype))


def test_two_workers_learn_what_one_learns(
    ray_cluster: None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows in the same steps, shared out: equal losses up to the order of sums."""
    from d3d_ray.training.ray_train import train_on_ray

    as_worker(monkeypatch)
    from d3d_ray.training.trainer import train

    alone = make_config(
        folder / "target",
        folder / "a.jsonl",
        tmp_path / "alone",
        optimiser={"num_steps": 4, "accumulation": 2},
    )
    train(alone)
    shared = replace(
        alone,
        output=str(tmp_path / "shared"),
        num_workers=2,
        optimiser=replace(alone.optimiser, accumulation=1),
    )
    train_on_ray(shared, resume=False)
    one, two = read_metrics(tmp_path / "alone"), read_metrics(tmp_path / "shared")
    for mine, theirs in zip(one, two, strict=True):
        for name in ("loss", "learning_rate", "gradient_norm", "row"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_a_killed_worker_is_started_again_from_the_last_checkpoint(
    ray_cluster: None, folder: Path, tmp_path: Path
) -> None:
    from d3d_ray.training.ray_train import train_on_ray

    config = make_config(
        folder / "target",
        folder / "a.jsonl",
        tmp_path / "run",
        checkpoint_every=50,
        max_failures=1,
        optimiser={"num_steps": 400, "accumulation": 1},
    )
    killer = threading.Thread(target=kill_worker_after, args=(tmp_path / "run" / "checkpoints",))
    killer.start()
    train_on_ray(config, resume=False)
    killer.join(timeout=10)
    assert not killer.is_alive()
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, 401))
    # Each attempt opens a file of its own.
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2


def kill_worker_after(checkpoints: Path) -> None:
    """Wait for the first checkpoint, then kill the worker of this test's own cluster."""
    deadline = time.monotonic() + 120
    while not list_checkpoints(checkpoints) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [
        process
        for process in psutil.Process().children(recursive=True)
        if any("RayTrainWorker" in part for part in process.cmdline())
    ]
    assert len(workers) == 1
    workers[0].kill()


def test_a_failing_job_ends_with_a_non_zero_exit_code(
    ray_cluster: None, folder: Path, tmp_path: Path
) -> None:
    """The job joins the cluster of its environment, as a submitted one does."""
    (tmp_path / "a.jsonl").write_text('{"id": "broken", "prompt_ids": [1]}\n')
    config = make_config(folder / "target", tmp_path / "a.jsonl", tmp_path / "run")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    job = subprocess.run(
        [sys.executable, "jobs/train.py", "--config", str(tmp_path / "config.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
    )
    assert job.returncode == 1, job.stderr
    assert "lacks 'answer_ids'" in job.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
