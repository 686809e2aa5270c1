"""Runs of the trainer in this process: what it learns, writes, refuses and resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import make_request
from loops import run as decode
from safetensors.torch import load_file
from tiny import save_tiny
from training_runs import as_worker, make_config, read_metrics, write_answers

from d3d_ray.config import to_yaml
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter
from d3d_ray.models.loading import load_target
from d3d_ray.records import Mode
from d3d_ray.training.config import TrainingConfig

ROOT = Path(__file__).parents[1]
CPU = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    as_worker(monkeypatch)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "llama", tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("answers") / "a.jsonl"
    write_answers(file)
    return file


def train(config: TrainingConfig, **options: Any) -> None:
    from d3d_ray.training import trainer  # Imports DeepSpeed, which takes seconds.

    trainer.train(config, **options)


@pytest.mark.slow
@pytest.mark.parametrize("label_shift", [True, False])
def test_an_overfitted_answer_is_served_with_every_draft_accepted(
    target_folder: Path, tmp_path: Path, label_shift: bool
) -> None:
    target = load_target(str(target_folder), **CPU)
    prompt = (20, 31, 42)
    answer = decode(target, None, [make_request(prompt=prompt, mode="ar")], vocab_size=512)
    record = {"id": "a", "prompt_ids": prompt, "answer_ids": answer.tokens("a")}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record) + "\n")
    config = make_config(
        target_folder,
        file,
        tmp_path / "run",
        drafter={"label_shift": label_shift},
        data={"heldout_share": 0.0, "num_anchors": 40, "loop_filter": False},
        optimiser={"num_steps": 150, "accumulation": 1, "learning_rate": 5e-3},
        log_every=50,
    )
    from d3d_ray.training.evaluation import serve
    from d3d_ray.training.setup import load_drafter_for

    def count_accepted(drafter: DrafterModel, mode: Mode) -> list[tuple[int, int]]:
        (last,) = serve(target, drafter, [prompt], mode=mode, max_tokens=33)
        return [(r.num_drafts, r.num_accepted) for r in last.rounds if not r.is_prefill]

    untrained = load_drafter_for(config)
    train(config)
    drafter = load_drafter(
        str(tmp_path / "run" / "drafter"), target_source=str(target_folder), **CPU
    )
    assert drafter.is_trained and drafter.label_shift == label_shift
    for mode in (Mode.SYNC, Mode.ASYNC):
        assert count_accepted(drafter, mode) == [(3, 3)] * 8
        assert len(count_accepted(untrained, mode)) > 12


def test_twenty_steps_are_ten_and_ten_more_after_a_resume(
    target_folder: Path, answers: Path, tmp_path: Path
) -> None:
    from d3d_ray.training.trainer import Interrupted

    whole = make_config(target_folder, answers, tmp_path / "whole")
    train(whole)
    config = replace(whole, output=str(tmp_path / "parts"))
    steps = iter(range(1, 100))
    with pytest.raises(Interrupted, match="after step 10"):
        train(config, should_stop=lambda: next(steps) == 10)
    assert len(read_metrics(tmp_path / "parts")) == 10
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 0.0}\n{"step": 12, "lo')  # Killed behind its checkpoint.
    train(config, resume=True)
    straight, resumed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    assert [line["step"] for line in resumed] == list(range(1, 21))
    for one, two in zip(straight, resumed, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert one[name] == pytest.approx(two[name], abs=1e-6, nan_ok=True), name
    weights = [
        load_file(tmp_path / n / "drafter" / "model.safetensors") for n in ("whole", "parts")
    ]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-6, rtol=0)
    assert len(list((tmp_path / "parts" / "checkpoints").iterdir())) == 2
    shutil.rmtree(tmp_path / "parts" / "drafter")  # Killed behind its last checkpoint.
    train(config, resume=True)
    again = load_file(tmp_path / "parts" / "drafter" / "model.safetensors")
    assert all(torch.equal(again[name], weights[1][name]) for name in again)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_exported_drafter_is_the_trained_one_bit_for_bit(
    target_folder: Path, answers: Path, tmp_path: Path, stage: int, dtype: str
) -> None:
    from d3d_ray.training.engine import prepare_process
    from d3d_ray.training.trainer import Trainer

    options = {"zero_stage": stage, "dtype": dtype, "num_steps": 2, "learning_rate": 1e-2}
    config = make_config(target_folder, answers, tmp_path / "run", optimiser=options)
    trainer = Trainer(config, prepare_process(config), lambda step, figures: None)
    before = trainer._engine.gather()
    trainer.run(0, lambda: False)
    gathered = trainer._engine.gather()
    drafter = load_drafter(
        str(tmp_path / "run" / "drafter"),
        target_source=str(target_folder),
        dtype=getattr(torch, dtype),
        device="cpu",
    )
    state = drafter.network.state_dict()
    assert state.keys() == gathered.keys()
    for name, tensor in state.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, gathered[name]), name
        assert tensor.any() or not before[name].any(), f"{name} is all zeros"
    frozen = {"model.model.embed_tokens.weight", "model.lm_head.weight"}
    changed = {name for name in state if not torch.equal(before[name], gathered[name])}
    assert changed == set(state) - frozen
    stored = load_file(tmp_path / "run" / "drafter" / "model.safetensors")
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & stored.keys()
    assert "mask_embedding" in stored


def test_trained_embeddings_are_stored_in_the_drafter_s_folder(
    target_folder: Path, answers: Path, tmp_path: Path
) -> None:
    config = make_config(
        target_folder,
        answers,
        tmp_path / "run",
        objective={"train_embeddings": True, "train_head": True},
        optimiser={"num_steps": 2},
    )
    train(config)
    drafter = load_drafter(str(tmp_path / "run" / "drafter"), target_source="/unused", **CPU)
    assert drafter.section.shared_with_target == ()
    target = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    network = drafter.network.model
    assert not torch.equal(network.model.embed_tokens.weight, target)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    one = replace(config, objective=replace(config.objective, train_head=False))
    with pytest.raises(ValueError, match=r"tied.*objective\.train_head"):
        train(replace(one, output=str(tmp_path / "other")))


def test_an_evaluation_serves_the_drafter_and_sounds_an_alarm(
    target_folder: Path,
    answers: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from d3d_ray.training import outputs

    evaluation = {"every": 2, "num_prompts": 2, "max_tokens": 12, "num_documents": 3}
    config = make_config(
        target_folder, answers, tmp_path / "run", evaluation=evaluation, optimiser={"num_steps": 4}
    )
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(outputs, "ALARM_RATIO", 100.0)
    train(config, on_figures=lambda step, f: seen.append((step, "served_sync" in f)))
    assert seen == [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]
    last = read_metrics(tmp_path / "run")[-1]
    assert 1.0 <= last["served_sync"] <= 4.0 and 1.0 <= last["served_async"] <= 4.0
    assert 1.0 <= last["teacher_forced"] <= 4.0 and len(last["draft_accuracies"]) == 3
    assert last["alarm"] and "ALARM: the served acceptance length" in caplog.text
    assert (tmp_path / "run" / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def damage(folder: Path, how: str) -> None:
    files = sorted(folder.rglob("*.pt"))
    if how == "changed":
        data = bytearray(files[0].read_bytes())
        data[len(data) // 2] ^= 1
        files[0].write_bytes(data)
    elif how == "missing":
        files[-1].unlink()
    elif how == "no manifest":
        (folder / "complete.json").unlink()
    elif how == "cut off":
        folder.rename(folder.with_suffix(".partial"))
    elif how == "none":
        shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["changed", "missing", "no manifest", "cut off", "none"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_overwritten(
    target_folder: Path, answers: Path, tmp_path: Path, how: str
) -> None:
    config = make_config(target_folder, answers, tmp_path / "run", optimiser={"num_steps": 2})
    train(config)
    damage(tmp_path / "run" / "checkpoints" / "step-00000002", how)
    before = snapshot(tmp_path)
    words = "no whole checkpoint" if how in ("cut off", "none") else "is damaged"
    with pytest.raises(ValueError, match=words):
        train(config, resume=True)
    assert snapshot(tmp_path) == before


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in files}


def test_a_folder_of_another_run_is_refused(
    target_folder: Path, answers: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, answers, tmp_path / "run", optimiser={"num_steps": 1})
    train(config)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"holds the checkpoints of a run: add --resume"):
        train(config)
    other = replace(config, optimiser=replace(config.optimiser, learning_rate=1.0))
    with pytest.raises(ValueError, match=r"optimiser\.learning_rate was 0.0003 and is 1\.0"):
        train(other, resume=True)
    with pytest.raises(ValueError, match=r"num_workers is 2, but 1"):
        train(replace(config, num_workers=2), resume=True)
    assert snapshot(tmp_path) == before
    longer = replace(config, optimiser=replace(config.optimiser, num_steps=2), log_every=2)
    train(longer, resume=True)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_drafter_goes_on_from_its_own_folder(
    target_folder: Path, answers: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, answers, tmp_path / "one", optimiser={"num_steps": 1})
    train(config)
    source = {
        "source": str(tmp_path / "one" / "drafter"),
        "block_size": None,
        "mask_token_id": None,
    }
    train(
        make_config(
            target_folder, answers, tmp_path / "two", drafter=source, optimiser={"num_steps": 1}
        )
    )
    drafters = [
        load_drafter(str(tmp_path / name / "drafter"), target_source=str(target_folder), **CPU)
        for name in ("one", "two")
    ]
    assert drafters[0].section == drafters[1].section
    assert drafters[1].section.shared_with_target == ("model.embed_tokens.weight",)


# --- the job -------------------------------------------------------------------------------------


def start_job(config: TrainingConfig, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    command = [sys.executable, "jobs/train.py", "--config", str(file), "--launcher", "none"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_signal_ends_a_job_with_a_checkpoint_and_another_exit_code(
    target_folder: Path, answers: Path, tmp_path: Path
) -> None:
    config = make_config(target_folder, answers, tmp_path / "run", optimiser={"num_steps": 100_000})
    job = start_job(config, tmp_path)
    assert job.stdout is not None
    for line in job.stdout:
        if "step 3 " in line:
            break
    job.send_signal(signal.SIGTERM)
    rest, _ = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGTERM
    assert "go on with --resume" in rest
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (tmp_path / "run" / "drafter" / "config.json").is_file()
    job = start_job(config, tmp_path, "--resume", "optimiser.num_steps=1")
    job.communicate(timeout=120)
    assert job.returncode == 0  # Nothing is left to do.
    shutil.rmtree(checkpoint)
    job = start_job(config, tmp_path, "--resume")
    text, _ = job.communicate(timeout=120)
    assert job.returncode == 2 and "error: there is no whole checkpoint" in text


def test_wrong_arguments_end_the_job_before_anything_is_loaded(capsys: Any) -> None:
    sys.path.insert(0, str(ROOT))
    from jobs.train import main

    assert main(["--config", "smollm2-cpu", "optimiser.stepz=1"]) == 2
    assert "unknown setting 'optimiser.stepz'" in capsys.readouterr().err
    assert main(["--config", "smollm3"]) == 2
    assert main(["--config", "smollm2-cpu", "--launcher", "mpi"]) == 2
    assert "invalid choice: 'mpi'" in capsys.readouterr().err
