"""Pruning: what is removed, what is measured, and that a run goes on where it was stopped."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tiny import MASK, tiny_model, tiny_tokenizer
from training_runs import as_worker

from d3d_ray.config import to_dict, to_yaml
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, save_drafter
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.models.section import DrafterSection
from d3d_ray.packing import mask_first, pack
from d3d_ray.pruning import report
from d3d_ray.pruning.anchors import Anchors, Tally, tokens
from d3d_ray.pruning.config import PruningConfig, StopConfig, load_pruning_config
from d3d_ray.pruning.estimates import difference, ratio
from d3d_ray.pruning.pruner import prune
from d3d_ray.pruning.state import Depth, restore
from d3d_ray.pruning.stopping import find_result, num_to_remove
from d3d_ray.settings import build
from d3d_ray.training.checkpoints import list_checkpoints
from d3d_ray.training.config import TrainingConfig
from d3d_ray.training.evaluation import whole_blocks
from d3d_ray.training.layout import BlockShape, Document, lay_out

ROOT = Path(__file__).parents[1]
NUM_LAYERS, IDLE = 5, 2
SOURCE_LAYERS = (0, 2, 4, 6, 8)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its drafter with a layer that does nothing, and answers that suit the drafter."""
    folder = tmp_path_factory.mktemp("pruning")
    model = tiny_model("llama", NUM_LAYERS, tie_word_embeddings=True)
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    with torch.no_grad():
        idle = model.model.layers[IDLE]
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    write_answers(folder / "answers.jsonl", model)
    network = DrafterNetwork(model, mask_token_id=MASK, mask_embedding=torch.full((32,), 0.1))
    section = DrafterSection(
        block_size=4,
        mask_token_id=MASK,
        label_shift=True,
        source_layers=SOURCE_LAYERS,
        is_trained=True,
    )
    drafter = DrafterModel(network, section, vocab_size=512)
    save_drafter(drafter, folder / "drafter", target_source=str(folder / "target"))
    return folder


def write_answers(file: Path, model: Any) -> None:
    """Greedy ones, so that the first draft behind a known token is right."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 512, (40, 4), generator=generator)
    with torch.inference_mode():
        for _ in range(20):
            logits = model(ids).logits[:, -1]
            logits[:, MASK] = -torch.inf
            ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
    lines = [
        json.dumps({"id": f"a/{number}", "prompt_ids": row[:4], "answer_ids": row[4:]})
        for number, row in enumerate(ids.tolist())
    ]
    file.write_text("\n".join(lines) + "\n")


def make_config(files: Path, output: Path, **changes: Any) -> PruningConfig:
    data: dict[str, Any] = {
        "output": str(output),
        "drafter": str(files / "drafter"),
        "num_confirmed": 2,
        "target": {"source": str(files / "target"), "dtype": "float32"},
        "stop": {"depth": 3},
        "anchors": {"num_ranking": 40, "num_confirming": 100, "per_document": 12},
        "timing": {"num_rows": 16, "num_cached": 8, "num_runs": 1},
        "data": {
            "files": str(files / "answers.jsonl"),
            "row_tokens": 64,
            "num_anchors": 8,
            "heldout_share": 0.5,
            "loop_filter": False,
        },
        "optimiser": {"num_steps": 2, "dtype": "float32", "learning_rate": 1e-3},
    }
    for name, value in changes.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return build(PruningConfig, data)


def do_nothing(config: TrainingConfig) -> None:
    """A healing that leaves the drafter as it is."""
    assert config.drafter.source is not None
    folder = Path(config.output) / "drafter"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(config.drafter.source, folder)


def train(config: TrainingConfig) -> None:
    from d3d_ray.training import trainer  # Imports DeepSpeed, which takes seconds.

    checkpoints = Path(config.output) / "checkpoints"
    trainer.train(config, resume=bool(list_checkpoints(checkpoints)))


def read_depths(output: Path) -> list[Depth]:
    """Without what depends on the machine."""
    depths = restore(json.loads((output / "pruning.json").read_text())).depths
    return [replace(depth, pass_ms=0.0) for depth in depths]


def load(files: Path, folder: Path) -> DrafterModel:
    target = str(files / "target")
    return load_drafter(str(folder), target_source=target, dtype=torch.float32, device="cpu")


# --- what comes out ------------------------------------------------------------------------------


def test_a_layer_that_does_nothing_is_removed_first_and_changes_nothing(
    files: Path, tmp_path: Path
) -> None:
    prune(make_config(files, tmp_path / "run"), do_nothing, resume=False)
    unpruned, first, second = read_depths(tmp_path / "run")
    assert first.removed == [SOURCE_LAYERS[IDLE]]
    assert first.unhealed == unpruned.healed
    assert first.ranking.index(max(first.ranking)) == IDLE
    assert len(set(first.ranking)) > 1, "the layers cannot be told apart"
    assert sum(second.healed["next_token"]) < sum(first.healed["next_token"])
    # The drafter as it was measured with layers skipped is the one that comes from the folder.
    assert first.healed == first.unhealed and second.healed == second.unhealed
    assert first.control == second.control == unpruned.healed
    assert second.layers == [layer for layer in first.layers if layer not in second.removed]


def test_the_result_has_its_new_depth_and_drafts_alike_with_and_without_a_cache(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_worker(monkeypatch)
    prune(make_config(files, tmp_path / "run"), train, resume=False)
    last = read_depths(tmp_path / "run")[-1]
    stored = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert stored["num_hidden_layers"] == 3
    assert stored["d3d"]["source_layers"] == last.layers
    assert stored["d3d"]["shared_with_target"]
    drafter = load(files, tmp_path / "run" / "drafter")
    assert drafter.num_layers == 3
    layers = drafter.network.model.model.layers
    assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2]
    clean = [20, 31, 42, 53, 64, 75, 86]
    branches = [mask_first(k, anchor_row=5, block_size=4, label_shift=True) for k in (0, 1)]
    whole = pack(clean, branches, start=0, mask_token_id=MASK)
    rows = [row for branch in whole.draft_rows for row in branch]
    with torch.inference_mode():
        hidden = drafter.network(
            whole.token_ids[None], whole.position_ids[None], whole.visible[None, None]
        )
        expected = drafter.network.head(hidden[0, rows])
        expected[:, MASK] = -torch.inf
    drafter.match_cache("a", clean[:5], 4)  # Nothing is cached yet.
    first = pack(clean[:5], [], start=0, mask_token_id=MASK)
    drafter.forward("a", first, 5, [4])
    start = drafter.match_cache("a", clean, 5)
    assert start == 5
    behind = [mask_first(k, anchor_row=0, block_size=4, label_shift=True) for k in (0, 1)]
    packed = pack(clean[5:], behind, start=5, mask_token_id=MASK)
    rows = [row for branch in packed.draft_rows for row in branch]
    logits = drafter.forward("a", packed, 2, rows)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert last.healed != last.unhealed or last.control != read_depths(tmp_path / "run")[0].healed


def test_table_picture_and_folders_are_there(files: Path, tmp_path: Path) -> None:
    prune(make_config(files, tmp_path / "run"), do_nothing, resume=False)
    table = (tmp_path / "run" / "pruning.md").read_text()
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows] == ["layers", "5", "4", "3"]
    assert {len(row) for row in rows} == {11}
    assert "100.00 ± 0.00 %" in table and "**3 layers**" in table
    assert (tmp_path / "run" / "pruning.png").read_bytes()[:4] == b"\x89PNG"
    depths = tmp_path / "run" / "depths"
    kept = sorted(str(f.parent.relative_to(depths)) for f in depths.rglob("config.json"))
    assert kept == ["3/control/drafter", "3/healing/drafter", "4/healing/drafter"]


def test_the_control_sees_the_rows_of_the_healing_and_every_round_others(
    files: Path, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def note(config: TrainingConfig) -> None:
        seen.append(to_dict(config))
        do_nothing(config)

    prune(make_config(files, tmp_path / "run", seed=7), note, resume=False)
    sources = [config["drafter"].pop("source") for config in seen]
    outputs = [config.pop("output") for config in seen]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert [config["seed"] for config in seen] == [8, 8, 9, 9]
    assert sources[1] == str(files / "drafter") and sources[3] == f"{outputs[1]}/drafter"
    assert sources[0].endswith("4/pruned") and sources[2].endswith("3/pruned")
    seen.clear()
    config = make_config(files, tmp_path / "alone", with_control=False)
    prune(config, note, resume=False)
    assert len(seen) == 2 and read_depths(tmp_path / "alone")[-1].control is None


def test_several_layers_go_at_once_but_never_below_the_wanted_depth(
    files: Path, tmp_path: Path
) -> None:
    config = make_config(files, tmp_path / "run", layers_per_round=3, stop={"depth": 1})
    prune(config, do_nothing, resume=False)
    depths = read_depths(tmp_path / "run")
    assert [depth.num_layers for depth in depths] == [5, 2, 1]
    assert SOURCE_LAYERS[IDLE] in depths[1].removed and len(depths[1].removed) == 3
    assert depths[1].healed == depths[1].unhealed


# --- going on ------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def kill_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = iter(range(1, 10_000))

    def counted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise Killed
        return function(*arguments, **options)

    return counted


@pytest.fixture(scope="module")
def straight(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Depth]:
    output = tmp_path_factory.mktemp("straight") / "run"
    prune(make_config(files, output), do_nothing, resume=False)
    return read_depths(output)


@pytest.mark.parametrize("number", [1, 4, 7, 9, 10, 13])
def test_a_run_that_was_killed_while_measuring_ends_as_one_that_was_not(
    files: Path,
    straight: list[Depth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(report, "draw", lambda state, picture: None)  # Takes most of the time.
    config = make_config(files, tmp_path / "run")
    measure = Anchors.measure
    monkeypatch.setattr(Anchors, "measure", kill_at(number, measure))
    with pytest.raises(Killed):
        prune(config, do_nothing, resume=False)
    calls: list[int] = []
    monkeypatch.setattr(Anchors, "measure", lambda *a: calls.append(1) or measure(*a))
    prune(config, do_nothing, resume=True)
    assert read_depths(tmp_path / "run") == straight
    # Rounds measure 5 + 2 and 4 + 2 times to choose, and healed and control; all once.
    assert len(calls) == 1 + (7 + 2) + (6 + 2) - (number - 1)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_run_that_was_killed_while_healing_ends_as_one_that_was_not(
    files: Path,
    straight: list[Depth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setattr(report, "draw", lambda state, picture: None)
    config = make_config(files, tmp_path / "run")
    with pytest.raises(Killed):
        prune(config, kill_at(number, do_nothing), resume=False)
    prune(config, do_nothing, resume=True)
    assert read_depths(tmp_path / "run") == straight


def test_a_finished_run_goes_on_to_another_depth(files: Path, tmp_path: Path) -> None:
    config = make_config(files, tmp_path / "run", stop={"depth": 4})
    prune(config, do_nothing, resume=False)
    assert load(files, tmp_path / "run" / "drafter").num_layers == 4
    faster = replace(config, stop=StopConfig(depth=2), layers_per_round=2)
    prune(faster, do_nothing, resume=True)
    assert [depth.num_layers for depth in read_depths(tmp_path / "run")] == [5, 4, 2]
    assert load(files, tmp_path / "run" / "drafter").num_layers == 2


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    found = (file for file in folder.rglob("*") if file.is_file())
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in found}


def test_what_does_not_fit_is_refused_and_nothing_is_overwritten(
    files: Path, tmp_path: Path
) -> None:
    config = make_config(files, tmp_path / "run", stop={"depth": 4})
    with pytest.raises(ValueError, match=r"no .*pruning\.json to resume"):
        prune(config, do_nothing, resume=True)
    prune(config, do_nothing, resume=False)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"is not empty: add --resume"):
        prune(config, do_nothing, resume=False)
    with pytest.raises(ValueError, match="seed was 0 and is 2 now"):
        prune(replace(config, seed=2), do_nothing, resume=True)
    answers = tmp_path / "fewer.jsonl"
    shutil.copy(files / "answers.jsonl", answers)
    other = make_config(files, tmp_path / "other", data={"files": str(answers)})
    prune(other, do_nothing, resume=False)
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text("".join(lines[:30]))
    with pytest.raises(ValueError, match="not those that the run began with"):
        prune(other, do_nothing, resume=True)
    assert before.items() <= snapshot(tmp_path).items()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop": {"depth": 5}}, r"has 5 layers, and 5 are to stay: give a smaller stop\.depth"),
        ({"stop": {"share": 0.9}}, r"stop\.share and stop\.depth are both set"),
        ({"data": {"heldout_share": 0.0}}, r"data\.heldout_share is 0\.0"),
        ({"data": {"heldout_share": 0.01}}, "held out"),
        ({"anchors": {"num_ranking": 10_000}}, "0 are left for confirming"),
        ({"num_workers": 2}, "needs launcher=ray"),
        ({"stop": {"depth": None, "pass_ms": 1e6}}, r"unpruned drafter takes .* give less"),
        ({"layers_per_round": 0}, "layers_per_round must be at least 1"),
        ({"drafter": "/nowhere/drafter"}, "no model folder"),
    ],
)
def test_bad_settings_are_refused(
    files: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        prune(make_config(files, tmp_path / "run", **changes), do_nothing, resume=False)


def test_a_checkpoint_that_is_no_drafter_is_refused(files: Path, tmp_path: Path) -> None:
    config = make_config(files, tmp_path / "run", drafter=str(files / "target"))
    with pytest.raises(ValueError, match="not the folder of a trained drafter"):
        prune(config, do_nothing, resume=False)


def test_the_recipe_is_valid() -> None:
    config = load_pruning_config("smollm2-cpu", ["stop.depth=20"])
    assert config.stop.depth == 20 and config.stop.min_share is None
    assert load_pruning_config("smollm2-cpu").stop.min_share == 0.99


# --- rules and figures ---------------------------------------------------------------------------


def make_depth(num_layers: int, length: int, pass_ms: float = 0.0) -> Depth:
    tally = Tally(known_anchor=[length, length], mask_first=[0, 0], next_token=[0, 0])
    return Depth(
        layers=list(range(num_layers)),
        removed=[],
        unhealed=tally,
        healed=tally,
        control=None,
        pass_ms=pass_ms,
    )


@pytest.mark.parametrize(
    ("stop", "lengths", "result"),
    [
        (StopConfig(), [1000], None),
        (StopConfig(), [1000, 1010, 990], None),
        (StopConfig(), [1000, 1010, 989], 9),
        (StopConfig(share=0.9), [1000, 950, 900], None),
        (StopConfig(share=0.9), [1000, 950, 899], 9),
        (StopConfig(share=0.99), [1000, 500], 10),
        (StopConfig(share=0.5), [1000] * 10, 1),
        (StopConfig(depth=9), [1000], None),
        (StopConfig(depth=9), [1000, 100], 9),
        (StopConfig(pass_ms=80.0), [1000, 100], None),
        (StopConfig(pass_ms=80.0), [1000, 100, 10], 8),
        (StopConfig(pass_ms=5.0), [1000] * 10, 1),
    ],
)
def test_a_run_stops_by_its_rule(stop: StopConfig, lengths: list[int], result: int | None) -> None:
    depths = [make_depth(10 - i, length, 100.0 - 10 * i) for i, length in enumerate(lengths)]
    found = find_result(stop, depths)
    assert (None if found is None else found[0].num_layers) == result


def test_a_round_removes_no_more_than_is_wanted() -> None:
    assert num_to_remove(StopConfig(depth=8), make_depth(10, 1), 3) == 2
    assert num_to_remove(StopConfig(), make_depth(10, 1), 3) == 3
    assert num_to_remove(StopConfig(), make_depth(2, 1), 3) == 1


def test_the_error_of_a_mean_is_that_of_documents_as_clusters() -> None:
    values = [2.0, 3.0, 5.0, 6.0]
    plain = ratio(values, [1] * 4)
    assert plain.value == 4.0
    assert plain.error == pytest.approx(math.sqrt(10 / 3 / 4))
    # Ten equal anchors in a document tell no more than one.
    assert ratio([10 * value for value in values], [10] * 4) == plain
    assert ratio([4, 8, 12], [2, 4, 6]).error == 0.0  # In proportion.
    # The spread over documents is common to both, and goes out of the paired difference.
    change = difference([value + 1 for value in values], values, [1] * 4)
    assert (change.value, change.error) == (1.0, 0.0)
    assert math.isnan(ratio([0, 0], [0, 0]).value)


@pytest.mark.parametrize("label_shift", [True, False])
def test_the_rows_of_a_whole_block_predict_what_follows_its_first_slot(label_shift: bool) -> None:
    shape = BlockShape(block_size=4, label_shift=label_shift, mask_token_id=99)
    document = Document((1, 2), tuple(range(3, 20)))
    row = lay_out([document], shape, num_anchors=16, seeded_share=0.5, rng=Random(0))
    blocks = whole_blocks(row, shape)
    assert {block.is_seeded for block in blocks} == {True, False}
    slots = []
    for block in blocks:
        labels = row.labels[block.rows].tolist()
        assert labels == list(range(labels[0], labels[0] + 3))
        slots.append(labels[0] - 2)  # Tokens count from 1, slots from 0.
        masks = block.rows[row.block[block.rows] >= 0]
        assert (row.end_column[masks] == slots[-1] + block.is_seeded).all()
    assert sorted(slots) == list(range(2, 2 + len(slots)))


def test_tallies_hold_blocks_of_both_kinds(files: Path, tmp_path: Path) -> None:
    prune(make_config(files, tmp_path / "run", stop={"depth": 4}), do_nothing, resume=False)
    state = restore(json.loads((tmp_path / "run" / "pruning.json").read_text()))
    blocks, unpruned = state.counts, state.depths[0].healed
    assert sum(tokens(blocks)) >= 100
    for name in ("known_anchor", "mask_first"):
        assert sum(blocks[name]) >= 20  # type: ignore[literal-required]
    assert unpruned["next_token"] == blocks["next_token"], "the answers are the drafter's own"
    # Then the first draft behind a known token is right.
    pairs = zip(unpruned["known_anchor"], blocks["known_anchor"], strict=True)
    assert all(length >= 2 * count for length, count in pairs)


# --- the job -------------------------------------------------------------------------------------


def start_job(config: PruningConfig, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    file = folder / "config.yaml"
    file.write_text(to_yaml(config))
    return subprocess.Popen(
        [sys.executable, "jobs/prune.py", "--config", str(file), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )


def wait_for(job: "subprocess.Popen[str]", words: str) -> None:
    assert job.stdout is not None
    seen = []
    for line in job.stdout:
        seen.append(line)
        if words in line:
            return
    raise AssertionError("".join(seen))


@pytest.mark.slow
def test_a_job_that_is_stopped_and_killed_goes_on_to_the_same_result(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"stop": {"depth": 4}, "checkpoint_every": 1, "log_every": 1}
    options["optimiser"] = {"num_steps": 20}
    as_worker(monkeypatch)
    prune(make_config(files, tmp_path / "straight", **options), train, resume=False)
    config = make_config(files, tmp_path / "parts", **options)
    job = start_job(config, tmp_path)
    wait_for(job, "step 3 ")
    job.terminate()
    rest, _ = job.communicate(timeout=120)
    assert job.returncode == 143 and "stopped after step" in rest  # The trainer's words.
    job = start_job(config, tmp_path, "--resume")
    wait_for(job, "control: 20 steps")
    wait_for(job, "step 3 ")
    job.kill()
    job.communicate(timeout=120)  # Its trainer has the same pipe, and ends by itself.
    job = start_job(config, tmp_path, "--resume")
    text, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and "ranking" not in text.replace("ranking: ", ""), text
    assert read_depths(tmp_path / "parts") == read_depths(tmp_path / "straight")


@pytest.fixture
def main() -> Iterator[Callable[[list[str]], int]]:
    """The job's, which sets handlers of signals."""
    sys.path.insert(0, str(ROOT))
    from jobs.prune import main

    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield main
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def test_wrong_arguments_end_the_job_with_2(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "smollm2-cpu", "stop.dept=1"]) == 2
    assert "unknown setting 'stop.dept'" in capsys.readouterr().err
    output = f"output={tmp_path / 'run'}"
    assert main(["--config", "smollm2-cpu", "drafter=/nowhere/drafter", output]) == 2
    assert "error: there is no model folder" in capsys.readouterr().err


def test_signals_end_the_job_with_their_codes(
    main: Callable[[list[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import jobs.prune

    sent: list[signal.Signals] = [signal.SIGINT, signal.SIGTERM]
    monkeypatch.setattr(jobs.prune, "run", lambda *_, **__: signal.raise_signal(sent.pop(0)))
    assert main(["--config", "smollm2-cpu"]) == 130
    with pytest.raises(SystemExit) as ended:
        main(["--config", "smollm2-cpu"])
    assert ended.value.code == 143
