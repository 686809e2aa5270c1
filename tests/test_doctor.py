"""The preflight and the GPU check: what they say of good and bad machines, pairs and models."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from packaging.requirements import Requirement
from tiny import END, MASK, save_tiny, tiny_model, tiny_tokenizer
from transformers import PretrainedConfig

from d3d_ray.bench import packed_alone
from d3d_ray.bench.check import Check, Status, report
from d3d_ray.bench.curves import Curve, Deadline, draft_curve, judge_fit, verify_curve
from d3d_ray.bench.doctor import examine
from d3d_ray.bench.gpu_check import FULL, CheckPlan, build_drafter, gpu_check
from d3d_ray.bench.identity import Decoding, compare_decoding, measure_shortfall
from d3d_ray.bench.machine import check_shared_memory, fault_of_package, fault_of_python
from d3d_ray.bench.packed_alone import compare_packing
from d3d_ray.bench.pair import Need, Pair, check_fit, check_pairing, judge_room
from d3d_ray.bench.probe import Device
from d3d_ray.bench.shapes import count_kv_bytes, count_weight_bytes, known_shape
from d3d_ray.config import EngineConfig, from_dict, load_config, to_yaml
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.target import Target
from d3d_ray.packing import PackedPass, pack

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def tiny_config(**changes: Any) -> PretrainedConfig:
    return tiny_model("qwen3", **changes).config


def tiny_plan(**changes: Any) -> CheckPlan:
    plan = CheckPlan(
        targets={"one": tiny_config(), "two": tiny_config(num_layers=3)},
        drafters={"small": tiny_config(tie_word_embeddings=True), "large": tiny_config()},
        dtype=torch.float32,
        block_size=4,
        mask_token_id=MASK,
        num_prompt=8,
        num_tokens=12,
        num_cached=(16, 300),
        verify_rows=(1, 2),
        draft_rows=(4, 13),
        spare_bytes=0,
        min_seconds=0.0,
    )
    return dataclasses.replace(plan, **changes)


def tiny_target() -> Target:
    return Target(tiny_model("qwen3"), vocab_size=512)


def tiny_drafter(dtype: torch.dtype = torch.float32) -> DrafterModel:
    return build_drafter(tiny_config(), tiny_plan(dtype=dtype), CPU)


def device(free_gb: float, uuid: str = "cpu") -> Device:
    return Device(
        node_id="node",
        name="some device",
        uuid=uuid,
        num_gpus=0 if uuid == "cpu" else 1,
        num_threads=1,
        free_bytes=int(free_gb * 1e9),
    )


# --- the machine ---------------------------------------------------------------------------------


def test_small_shared_memory_is_warned_of_with_the_size_to_give() -> None:
    check = check_shared_memory(64 * 1024**2, 7 * 10**9)
    assert check.status is Status.WARN
    assert "67.1 MB free" in check.text and "--shm-size=8g" in check.text


def test_enough_shared_memory_passes() -> None:
    assert check_shared_memory(8 * 10**9, 7 * 10**9).status is Status.OK


def test_a_missing_package_fails_and_another_version_is_warned_of() -> None:
    wanted = Requirement("transformers==5.23.0")
    assert fault_of_package(wanted, "5.23.0") is None
    missing, other = fault_of_package(wanted, ""), fault_of_package(wanted, "5.24.0")
    assert missing is not None and missing[0] is Status.FAIL
    assert "pip install 'transformers==5.23.0'" in missing[1]
    assert other is not None and other[0] is Status.WARN and "5.24.0" in other[1]


def test_local_version_suffixes_satisfy_a_pin() -> None:
    assert fault_of_package(Requirement("torch>=2.13"), "2.13.0+cu130") is None


def test_an_old_python_fails() -> None:
    fault = fault_of_python("3.10.2", ">=3.11")
    assert fault is not None and fault[0] is Status.FAIL
    assert fault_of_python("3.12.1", ">=3.11") is None


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gigabytes", "kv_bytes"),
    [
        ("Qwen/Qwen3-1.7B", 3.44, 114_688),
        ("Qwen/Qwen3-8B", 16.38, 147_456),
        ("Qwen/Qwen3-32B", 65.52, 262_144),
    ],
)
def test_known_shapes_weigh_what_the_models_weigh(
    name: str, gigabytes: float, kv_bytes: int
) -> None:
    config = known_shape(name)
    assert config is not None
    assert count_weight_bytes(config, torch.bfloat16) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert count_kv_bytes(config, torch.bfloat16) == kv_bytes


def test_kv_bytes_of_a_shape_are_those_of_a_running_model() -> None:
    assert count_kv_bytes(tiny_config(), torch.float32) == tiny_target().kv_bytes_per_token


def test_a_pair_that_does_not_fit_fails_with_the_numbers() -> None:
    pair = Pair.find(load_config("qwen3-32b"))
    check = check_fit(pair, device(60, "GPU-0"), device(60, "GPU-1"))
    assert check.status is Status.FAIL
    assert "65.5 GB" in check.text and "60.0 GB free" in check.text
    assert check.data["tokens"]["target"] == 0 < check.data["tokens"]["drafter"]


def test_a_pair_fits_on_two_devices_and_not_on_one_of_them() -> None:
    pair = Pair.find(load_config("qwen3-32b"))
    assert check_fit(pair, device(80, "GPU-0"), device(80, "GPU-1")).status is Status.OK
    check = check_fit(pair, device(80, "GPU-0"), device(80, "GPU-0"))
    assert check.status is Status.FAIL and "81.9 GB of weights" in check.text


def test_room_for_less_than_the_context_is_warned_of_with_the_context_that_fits() -> None:
    need = Need(weight_bytes=10**9, kv_bytes_per_token=10**6)
    check = judge_room({"target": need}, {"target": 2 * 10**9}, context=4096)
    assert check.status is Status.WARN and "target.max_context=800" in check.text
    assert judge_room({"target": need}, {"target": 2 * 10**9}, context=800).status is Status.OK


# --- the pair ------------------------------------------------------------------------------------


def folder_config(folder: Path, **drafter: Any) -> EngineConfig:
    settings = {"num_layers": 1, "block_size": 4, "mask_token_id": MASK, **drafter}
    return from_dict(
        {
            "target": {"source": str(folder), "dtype": "float32"},
            "drafter": settings,
            "decode": {"max_draft_rows": 16},
        }
    )


def test_a_good_pair_passes(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    check = check_pairing(Pair.find(folder_config(tmp_path)))
    assert check.status is Status.OK, check.text


def test_a_mask_token_that_stops_answers_fails(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    check = check_pairing(Pair.find(folder_config(tmp_path, mask_token_id=END)))
    assert check.status is Status.FAIL and "stop token" in check.text


def test_a_drafter_with_another_vocabulary_fails(tmp_path: Path) -> None:
    save_tiny(tmp_path / "target", "qwen3")
    save_tiny(tmp_path / "drafter", "qwen3")
    tiny_tokenizer(500).save_pretrained(tmp_path / "drafter")
    config = folder_config(tmp_path / "target", source=str(tmp_path / "drafter"), num_layers=None)
    check = check_pairing(Pair.find(config))
    assert check.status is Status.FAIL and "id 500" in check.text


def test_a_model_that_is_not_here_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    pair = Pair.find(from_dict({"target": {"source": "nobody/has-this-model"}}))
    check = check_pairing(pair)
    assert check.status is Status.WARN and "hf download nobody/has-this-model" in check.text
    assert check_fit(pair, device(1), device(1)).status is Status.WARN


def test_a_folder_that_is_not_there_fails() -> None:
    check = check_pairing(Pair.find(from_dict({"target": {"source": "./no/such/folder"}})))
    assert check.status is Status.FAIL and "./no/such/folder" in check.text


# --- curves --------------------------------------------------------------------------------------


def test_a_verification_is_timed_for_every_row_count_that_fits_the_context() -> None:
    target = Target(tiny_model("qwen3"), vocab_size=512, max_context=40)
    curve = verify_curve(target, (1, 8, 4, 9), num_cached=32)
    assert list(curve.milliseconds) == [1, 4, 8] and curve.skipped == (9,)
    assert all(ms > 0 for ms in curve.milliseconds.values())


@pytest.mark.parametrize("num_cached", [1, 40, 300])
def test_a_timed_pass_has_as_many_rows_as_it_says(
    num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = tiny_drafter()
    sizes = []
    forward = drafter.forward

    def spy(request: str, packed: PackedPass, num_glue: int, rows: Any) -> torch.Tensor:
        sizes.append((len(packed.token_ids), num_glue))
        return forward(request, packed, num_glue, rows)

    monkeypatch.setattr(drafter, "forward", spy)
    for num_rows, num_glue in ((1, 1), (4, 4), (13, 4), (18, 4)):
        curve = draft_curve(drafter, (num_rows,), num_cached=num_cached)
        assert sizes[-1] == (num_rows, num_glue)
        assert curve.milliseconds[num_rows] > 0


def test_a_curve_stops_when_the_time_is_up() -> None:
    curve = verify_curve(tiny_target(), (1, 2), num_cached=4, deadline=Deadline(0.0))
    assert curve.milliseconds == {} and curve.skipped == (1, 2)


@pytest.mark.parametrize(
    ("hop_ms", "fits", "advice"),
    [(0.1, True, ""), (3.0, False, "decode.max_draft_rows=32"), (8.0, False, "fewer layers")],
)
def test_the_verdict_on_the_balance_names_a_row_count_that_fits(
    hop_ms: float, fits: bool, advice: str
) -> None:
    verify = Curve(num_cached=256, milliseconds={8: 20.0})
    draft = Curve(num_cached=256, milliseconds={8: 6.0, 32: 14.0, 64: 19.0})
    is_fitting, text = judge_fit(verify, draft, block_size=8, max_draft_rows=64, hop_ms=hop_ms)
    assert is_fitting is fits and advice in text
    assert ("decode.max_draft_rows" in text) is ("decode.max_draft_rows" in advice)


# --- exactness -----------------------------------------------------------------------------------


def test_block_decoding_is_plain_decoding_in_fp32_while_drafts_are_kept_and_rejected() -> None:
    found = compare_decoding(tiny_target(), num_prompt=8, num_tokens=40, block_size=4)
    assert found.status is Status.OK and found.num_tokens == 40
    assert found.gaps == ()
    assert 0 < found.num_accepted < found.num_drafts


def test_a_target_that_answers_blocks_differently_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    forward = target.forward

    def shifted(blocks: Any) -> list[torch.Tensor]:
        return [x.roll(1, dims=-1) if len(x) > 1 else x for x in forward(blocks)]

    monkeypatch.setattr(target, "forward", shifted)
    found = compare_decoding(target, num_prompt=8, num_tokens=12, block_size=4)
    assert found.status is Status.FAIL and found.num_wrong > 0 and found.num_tokens == 12


@pytest.mark.parametrize(
    ("gap", "noise_units", "status"),
    [
        (2.0, 0.0, Status.OK),
        (3.0, 0.0, Status.FAIL),
        (3.0, 4.0, Status.WARN),
        (5.0, 4.0, Status.FAIL),
        (20.0, 1000.0, Status.FAIL),
    ],
)
def test_only_a_near_tie_passes_and_only_measured_noise_excuses_more(
    gap: float, noise_units: float, status: Status
) -> None:
    found = Decoding(
        num_tokens=8,
        num_wanted=8,
        num_drafts=9,
        num_accepted=4,
        gaps=(gap,),
        noise_units=noise_units,
    )
    assert found.status is status


def test_a_comparison_that_ran_out_of_time_says_so() -> None:
    found = compare_decoding(
        tiny_target(), num_prompt=8, num_tokens=12, block_size=4, deadline=Deadline(0.0)
    )
    assert found.status is Status.WARN and found.num_tokens == 0


def test_a_shortfall_is_counted_in_units_of_the_larger_logit() -> None:
    logits = torch.tensor([4.0, 3.96875, 3.0], dtype=torch.bfloat16)  # A unit of 4 is 1/32.
    assert [measure_shortfall(logits, token) for token in range(3)] == [0.0, 1.0, 32.0]


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_packed_branches_are_those_alone(dtype: torch.dtype, largest: float) -> None:
    found = compare_packing(tiny_drafter(dtype), num_cached=300)
    assert found.status is Status.OK and found.num_rows == 4 + 4 * 3
    assert found.difference < largest and found.agreement > 0.8


def test_branches_that_see_each_other_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(*args: Any, **kwargs: Any) -> PackedPass:
        packed = pack(*args, **kwargs)
        return dataclasses.replace(packed, visible=torch.ones_like(packed.visible))

    monkeypatch.setattr(packed_alone, "pack", leaky)
    assert compare_packing(tiny_drafter(), num_cached=16).status is Status.FAIL


# --- the GPU check, on the CPU -------------------------------------------------------------------


def test_the_gpu_check_makes_every_part_for_every_model() -> None:
    checks = list(gpu_check(tiny_plan(), device=CPU))
    assert [check.name for check in checks if check.status is not Status.OK] == []
    names = [check.name for check in checks]
    for target in ("target one", "target two"):
        assert names.count(f"{target}: greedy identity") == 1
        assert names.count(f"{target}: T_verify") == 2
    assert "drafter small: packed = alone" in names
    assert "drafter large: packed = alone" not in names
    for drafter in ("drafter small", "drafter large"):
        assert names.count(f"{drafter}: T_draft") == 2


def test_without_time_the_gpu_check_skips_every_model_and_says_so() -> None:
    checks = list(gpu_check(tiny_plan(min_seconds=10.0), device=CPU, seconds=5.0))
    assert len(checks) == 4
    assert all(c.status is Status.WARN and "time budget" in c.text for c in checks)


def test_a_model_that_is_too_large_is_skipped_with_the_numbers() -> None:
    checks = list(gpu_check(tiny_plan(spare_bytes=10**15), device=CPU))
    assert len(checks) == 4
    assert all(c.status is Status.WARN and "it needs 1000000.0 GB" in c.text for c in checks)


def test_a_model_that_fails_does_not_end_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("d3d_ray.bench.gpu_check.compare_decoding", fail)
    checks = list(gpu_check(tiny_plan(), device=CPU))
    failed = [check for check in checks if check.status is Status.FAIL]
    assert [check.name for check in failed] == ["target one", "target two"]
    assert all("no memory left" in check.text for check in failed)
    assert "drafter small: T_draft" in [check.name for check in checks]


def test_the_full_plan_has_the_models_of_the_paper() -> None:
    assert [config.num_hidden_layers for config in FULL.targets.values()] == [36, 64]
    assert [config.num_hidden_layers for config in FULL.drafters.values()] == [28, 36]


# --- the report and the job ----------------------------------------------------------------------


def test_a_report_fails_when_one_check_fails_and_holds_all(tmp_path: Path) -> None:
    checks = [
        Check(name="a", status=Status.FAIL, text="broken", data={"n": 1}),
        Check(name="b", status=Status.WARN, text="slow"),
    ]
    file = tmp_path / "report.json"
    assert report(checks, file, gpu=False) == 1
    written = json.loads(file.read_text())
    assert written["ok"] is False and written["gpu"] is False
    assert written["checks"][0] == {
        "name": "a",
        "status": "FAIL",
        "text": "broken",
        "data": {"n": 1},
    }
    assert report(checks[1:]) == 0


def test_a_ray_that_does_not_start_fails_and_the_rest_is_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**kwargs: object) -> None:
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    save_tiny(tmp_path, "qwen3")
    statuses = {check.name: check for check in examine(folder_config(tmp_path))}
    assert statuses["ray"].status is Status.FAIL and "nobody listens" in statuses["ray"].text
    assert statuses["fit"].status is Status.OK
    assert "T_verify" not in statuses


def run_job(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "jobs/doctor.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_check_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    run = run_job("--gpu-check", "--json", str(tmp_path / "gpu.json"))
    assert run.returncode == 3 and run.stdout.startswith("no GPU here")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["gpu"] is False and written["checks"] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--set", "decode.modus=ar"], "decode.modus"),
        (["--preset", "qwen4"], "qwen4"),
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_bad_arguments_exit_with_2(arguments: list[str], named: str) -> None:
    run = run_job(*arguments)
    assert run.returncode == 2 and named in run.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_the_doctor_passes_a_tiny_pair_and_writes_what_it_measured(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen3")
    (tmp_path / "pair.yaml").write_text(to_yaml(folder_config(tmp_path / "model")))
    file = tmp_path / "report.json"
    run = run_job("--preset", str(tmp_path / "pair.yaml"), "--json", str(file))
    assert run.returncode == 0, run.stdout + run.stderr
    written = json.loads(file.read_text())
    found = {check["name"]: check["data"] for check in written["checks"]}
    assert list(found["T_verify"]["milliseconds"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert found["T_draft"]["milliseconds"]["16"] == found["balance"]["draft_ms"] > 0
    used = found["transport"][found["transport"]["used"]]
    assert 0 < used["median_ms"] <= used["p99_ms"]
    assert written["config"]["decode"]["max_draft_rows"] == 16
    assert run.stdout.count("\n") == len(written["checks"])
