"""Mode ``dflash`` with real actors: the drafter in the verifier's, and comparisons with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_pairs import make_pair
from tiny import MASK, save_tiny

from d3d_ray.bench.compare import compare
from d3d_ray.bench.prompts import make_prompt
from d3d_ray.config import EngineConfig, from_dict, load_config
from d3d_ray.models.dflash_folder import save_dflash
from d3d_ray.records import Mode, Sampling
from d3d_ray.runtime.engine import Engine

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

PROMPTS = [tuple(range(10 + i, 14 + 3 * i)) for i in range(6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    save_tiny(root / "target", "qwen3", num_layers=6)
    _, drafter = make_pair("qwen3", block_size=8)
    save_dflash(drafter, root / "dflash")
    return root / "target", root / "dflash"


def make_config(folders: tuple[Path, Path], **sections: Any) -> EngineConfig:
    target, dflash = map(str, folders)
    return from_dict(
        {
            "target": {"source": target, "dtype": "bfloat16"},
            "drafter": {"block_size": 4, "mask_token_id": MASK},
            "dflash": {"source": dflash},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine(make_config(folders)) as engine:
        yield engine


def test_all_modes_give_one_text_in_bf16_beside_one_another(engine: Engine) -> None:
    samplings = [
        Sampling(max_tokens=24, seed=i, temperature=(i % 2) * 1.0, top_k=50 * (i % 3))
        for i in range(6)
    ]
    answers = {mode: engine.generate(PROMPTS, samplings, mode=mode) for mode in Mode}
    expected = [answer.tokens for answer in answers[Mode.AR]]
    for mode in Mode:
        assert [answer.tokens for answer in answers[mode]] == expected
    rounds = [r for answer in answers[Mode.DFLASH] for r in answer.rounds if not r.is_prefill]
    assert max(r.num_drafts for r in rounds) == 7
    assert all(r.draft_end_ns > 0 for r in rounds if r.num_drafts)


def test_a_comparison_shows_it_also_with_the_cores_that_it_leaves_idle(engine: Engine) -> None:
    result = compare(engine, [make_prompt("hi")], Sampling(max_tokens=12, ignore_eos=True))
    assert list(result.rounds) == list(Mode) and result.num_violations == 0
    assert set(result.all_cores) == {Mode.AR, Mode.DFLASH}
    names = [line.split("  ")[0] for line in result.table().splitlines()[2:8]]
    assert names == ["ar, all cores", "ar", "sync", "async", "dflash, all cores", "dflash"]
    written = result.to_json()
    assert written["dflash_with_all_cores"]["num_tokens"] == 11
    assert "untrained" in result.label(Mode.ASYNC) and not result.label(Mode.DFLASH)


def test_alone_it_needs_no_drafter_beside_it(folders: tuple[Path, Path], engine: Engine) -> None:
    expected = engine.generate(PROMPTS, Sampling(max_tokens=12), mode=Mode.AR)
    config = make_config(folders, decode={"mode": "dflash"}, runtime={"verifier_cpus": 2})
    with Engine(config) as alone:
        assert alone.supervisor.drafter() is None
        assert alone.supervisor.verifier_info.num_threads == 2
        answers = alone.generate(PROMPTS, Sampling(max_tokens=12))
        assert any(r.num_drafts for answer in answers for r in answer.rounds)
        assert len(answers) == len(expected)
        with pytest.raises(ValueError, match="needs a drafter"):
            alone.generate([PROMPTS[0]], mode=Mode.ASYNC)


def test_wrong_settings_and_folders_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for override, words in (
        ("decode.mode=dflash", r"set dflash\.source"),
        ("dflash.dtype=int8", r"dflash\.dtype must be"),
    ):
        with pytest.raises(ValueError, match=words):
            load_config("smollm2-cpu", [override])
    with pytest.raises(ValueError, match="never simulated"):
        make_config(folders, decode={"simulate_acceptance": 0.5})
    save_tiny(tmp_path / "other", "qwen3", num_layers=5)
    config = make_config((tmp_path / "other", folders[1]), decode={"mode": "dflash"})
    with pytest.raises(ValueError, match="num_target_layers=6, and this one has 5"):
        Engine(config)


def test_the_drafter_s_dtype_is_a_setting(folders: tuple[Path, Path]) -> None:
    from d3d_ray.runtime.verifier_actor import load_dflash_of, load_target_of

    config = make_config(folders, target={"source": str(folders[0]), "dtype": "float32"})
    target = load_target_of(config, torch.device("cpu"))
    drafter = load_dflash_of(config, target)
    assert drafter is not None and drafter.network.dtype is torch.float32
