"""The job as a user starts it, on a tiny target with random weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import MASK, save_tiny

ROOT = Path(__file__).parents[1]


def run_job(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "jobs/generate.py", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "model", "llama")
    config = {
        "name": "tiny",
        "target": {"source": str(folder / "model"), "dtype": "float32"},
        "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": MASK},
        "runtime": {"share_device": True},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return folder / "tiny.yaml"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--preset", "smollm3-cpu"], "nearest preset is 'smollm2-cpu'"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--prompt", " "], "the prompt is empty"),
        (["decode.mod=sync"], "nearest known one is 'decode.mode'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], complaint: str) -> None:
    run = run_job(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert complaint in line


@pytest.mark.ray
def test_compare_finds_the_same_tokens_and_writes_its_files(
    config_file: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": id_, "turns": [text]} for id_, text in (("a", "hello"), ("b", "grüße"))]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n")
    files = [tmp_path / name for name in ("out.json", "trace.json", "timeline.png")]
    run = run_job(
        *("--preset", config_file, "--prompts", prompts, "--mode", "compare"),
        *("--max-tokens", "24", "--ignore-eos", "--temperature", "0.8", "--seed", "3"),
        "decode.max_wait_ms=60000",  # A busy machine must not make plain steps out of hits.
        *("--json", files[0], "--trace", files[1], "--timeline", files[2]),
    )
    assert run.returncode == 0, run.stderr
    assert "identical: 2 of 2 prompts, token for token" in run.stdout
    assert "untrained drafter" in run.stdout
    data = json.loads(files[0].read_text())
    assert data["identical"] is True
    assert (data["preset"], data["num_prompts"], data["num_identical"]) == ("tiny", 2, 2)
    assert data["drafter_trained"] is False
    assert data["simulated"] is None
    assert set(data["modes"]) == {"ar", "sync", "async"}
    for figures in data["modes"].values():
        assert figures["num_tokens"] == 2 * 23
        assert figures["tokens_per_second"] > 0
        assert figures["acceptance_length"] >= 1.0
    assert data["modes"]["sync"]["outcomes"]["hit"] > 0.5
    names = {event["name"] for event in json.loads(files[1].read_text())["traceEvents"]}
    assert {"prefill", "verify 1", "draft for 1"} <= names
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.ray
def test_one_prompt_is_streamed_and_summed_up_in_a_line(config_file: Path, tmp_path: Path) -> None:
    json_file = tmp_path / "out.json"
    run = run_job(
        *("--preset", config_file, "--prompt", "hi", "--mode", "sync", "--max-tokens", "20"),
        *("--ignore-eos", "decode.max_wait_ms=60000", "--temperature", "1"),
        *("--simulate-acceptance", "1", "--json", json_file),
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("\n")
    assert len(run.stdout) > 5
    assert "sync: 19 tokens in" in run.stderr
    assert "SIMULATED acceptance 1, untrained drafter" in run.stderr
    assert "Traceback" not in run.stderr
    data = json.loads(json_file.read_text())
    assert (data["simulated"], data["identical"]) == (1.0, None)
    assert data["modes"]["sync"]["acceptance_length"] > 2.0


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_the_verifier_names_the_two_best_tokens_between_rounds(config_file: Path) -> None:
    import ray

    from d3d_ray.config import load_config
    from d3d_ray.records import Mode, Sampling
    from d3d_ray.runtime.engine import Engine

    sampling = Sampling(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
    with Engine(load_config(str(config_file), ["decode.mode=ar"])) as engine:
        (answer,) = engine.generate(["hello"], sampling)
        request = engine.request("hello", sampling, mode=Mode.AR)
        verifier = engine.supervisor.verifier()
        references = [verifier.find_top_two.remote(request, answer.tokens[:n]) for n in range(8)]
        (again,) = engine.generate(["hello"], sampling)
        found = ray.get(references, timeout=60)
    assert again.tokens == answer.tokens
    assert tuple(first.token for first, _ in found) == answer.tokens
