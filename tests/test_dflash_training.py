"""DFlash drafters in the trainer: the loss sees what serving sees; what is learned is served."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from dflash_pairs import make_pair
from loops import make_request
from loops import run as decode
from tiny import FAMILIES, MASK, save_tiny
from training_runs import as_worker, make_config, read_metrics, write_answers

from d3d_ray.decode.protocols import Block
from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.dflash_folder import load_dflash
from d3d_ray.models.loading import load_target
from d3d_ray.records import Mode
from d3d_ray.training.dflash import DFlashLoss, dflash_shape, judge_dflash, run_blocks
from d3d_ray.training.layout import IGNORED, Document, TrainingRow, lay_out
from d3d_ray.training.objective import combine, row_losses

CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
DOCUMENTS = [
    Document(tuple(range(10, 20)), tuple(range(30, 60))),
    Document((5, 6), tuple(range(100, 130))),
]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "llama", num_layers=6, tie_word_embeddings=True)
    return folder


def make_row(drafter: DFlashDrafter, documents: list[Document] = DOCUMENTS) -> TrainingRow:
    shape = dflash_shape(drafter)
    return lay_out(documents, shape, num_anchors=30, seeded_share=0.5, rng=Random(0))


def row_logits(drafter: DFlashDrafter, row: TrainingRow) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        blocks, hidden = run_blocks(drafter.network, drafter.target, drafter.layer_ids, row)
        logits: torch.Tensor = drafter.target.lm_head(hidden)
    return blocks, logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_over_the_very_logits_that_serving_drafts_from(family: str) -> None:
    target, drafter = make_pair(family, block_size=4)
    row = make_row(drafter)
    blocks, logits = row_logits(drafter, row)
    logits[:, MASK] = -torch.inf
    num_compared = 0
    starts = [0, len(DOCUMENTS[0].prompt) + len(DOCUMENTS[0].answer)]
    for number, (document, start) in enumerate(zip(DOCUMENTS, starts, strict=True)):
        tokens = (*document.prompt, *document.answer)
        for block in range(int(row.block.max()) + 1):
            rows = (row.block == block).nonzero()[:, 0]
            if int(row.first_column[rows[0]]) != start:
                continue
            anchor = int(row.position_ids[rows[0]])
            assert int(row.token_ids[rows[0]]) == tokens[anchor]
            assert int(row.labels[rows[0]]) == IGNORED
            name = f"{number}/{block}"
            target.forward([Block(name, 0, tokens[:anchor], 1, is_read=True)])
            served = drafter.draft(name, tokens[: anchor + 1])
            at = torch.searchsorted(blocks, rows[1:])
            torch.testing.assert_close(served, logits[at], atol=1e-4, rtol=1e-4)
            labels = row.labels[rows[1:]]
            expected = [*tokens[anchor + 1 : anchor + 4], *[IGNORED] * 3][:3]
            assert labels.tolist() == expected
            num_compared += 1
    assert num_compared == 30


def test_later_drafts_weigh_less_and_nothing_else_is_trained() -> None:
    target, drafter = make_pair("qwen3", block_size=4)
    module, row = DFlashLoss(drafter, gamma=2.0), make_row(drafter)
    total, denoising, autoregressive, by_draft = module(row)
    blocks, logits = row_logits(drafter, row)
    labels = row.labels[blocks]
    at = labels != IGNORED
    parts = combine(
        row_losses(logits[at], labels[at]),
        row.draft_index[blocks][at],
        gamma=2.0,
        ar_weight=0.0,
        num_drafts=3,
    )
    torch.testing.assert_close(total, parts.total)
    torch.testing.assert_close(by_draft, parts.by_draft)
    assert float(denoising) == float(total) and float(autoregressive) == 0.0
    total.backward()
    assert all(p.grad is not None for p in drafter.network.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert {name.split(".")[0] for name, _ in module.named_parameters()} == {"network"}


@pytest.mark.parametrize("change_at", [12, 22, 30])
def test_changing_tokens_behind_an_anchor_changes_no_earlier_block(change_at: int) -> None:
    """In the first document and in the second, which never sees the first."""
    _, drafter = make_pair("llama", block_size=4)
    tokens = [*DOCUMENTS[0].prompt, *DOCUMENTS[0].answer]
    changed = tokens[:change_at] + [(t + 211) % 400 + 4 for t in tokens[change_at:]]
    other = [Document(tuple(changed[:10]), tuple(changed[10:])), DOCUMENTS[1]]
    row = make_row(drafter)
    blocks, before = row_logits(drafter, row)
    _, after = row_logits(drafter, make_row(drafter, other))
    is_second = row.first_column[blocks] == len(tokens)
    same = is_second | (row.end_column[blocks] < change_at)  # The anchor stands at the end column.
    assert same.sum() > 10 and (~same).sum() > 10
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])


@pytest.mark.parametrize("attention", ["flex", "dense"])
def test_every_kind_of_attention_gives_the_same_loss(attention: Any) -> None:
    results = []
    for kind in ("sdpa", attention):
        _, drafter = make_pair("qwen2", block_size=4)
        with torch.no_grad():  # Torch has no backward pass of flex on the CPU.
            results.append(DFlashLoss(drafter, gamma=4.0, attention=kind)(make_row(drafter)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_an_overfitted_answer_is_served_with_every_draft_accepted(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_worker(monkeypatch)
    from d3d_ray.training.evaluation import serve
    from d3d_ray.training.trainer import train

    target, prompt = load_target(str(target_folder), **CPU), (20, 31, 42)
    answer = decode(target, None, [make_request(prompt=prompt, mode="ar")], vocab_size=512)
    record = {"id": "a", "prompt_ids": prompt, "answer_ids": answer.tokens("a")}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record) + "\n")
    config = make_config(
        target_folder,
        file,
        tmp_path / "run",
        drafter={"num_layers": 2},
        data={"heldout_share": 0.0, "num_anchors": 40, "loop_filter": False},
        objective={"kind": "dflash"},
        optimiser={"num_steps": 150, "accumulation": 1, "learning_rate": 5e-3},
        log_every=50,
    )
    train(config)
    drafter = load_dflash(
        str(tmp_path / "run" / "drafter"),
        target.model,
        target_source=str(target_folder),
        vocab_size=512,
        dtype=torch.float32,
    )
    target.read_with(drafter)
    (last,) = serve(target, drafter, [prompt], mode=Mode.DFLASH, max_tokens=33)
    rounds = [(r.num_drafts, r.num_accepted) for r in last.rounds if not r.is_prefill]
    assert rounds == [(3, 3)] * 8
    document = Document(prompt, answer.tokens("a"))
    length, accuracies = judge_dflash(drafter, [document])
    assert length == 4.0 and accuracies == [1.0] * 3


def test_a_run_resumes_and_evaluates_and_goes_on_from_its_own_export(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_worker(monkeypatch)
    from d3d_ray.training.trainer import Interrupted, train

    file = tmp_path / "a.jsonl"
    write_answers(file)
    settings: dict[str, Any] = {
        "drafter": {"num_layers": 2},
        "objective": {"kind": "dflash"},
        "optimiser": {"num_steps": 6},
        "evaluation": {"every": 6, "num_prompts": 2, "max_tokens": 8, "num_documents": 4},
    }
    whole = make_config(target_folder, file, tmp_path / "whole", **settings)
    train(whole)
    parts = make_config(target_folder, file, tmp_path / "parts", **settings)
    steps = iter(range(1, 100))
    with pytest.raises(Interrupted, match="after step 3"):
        train(parts, should_stop=lambda: next(steps) == 3)
    train(parts, resume=True)
    straight, resumed = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "parts")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6, 6]
    for one, two in zip(straight, resumed, strict=True):
        for name in one:
            assert one[name] == pytest.approx(two[name], abs=1e-6, nan_ok=True), name
    assert 1.0 <= resumed[-1]["served_dflash"] <= 4.0
    settings["drafter"] = {
        "source": str(tmp_path / "whole" / "drafter"),
        "block_size": None,
        "mask_token_id": None,
    }
    settings["optimiser"] = {"num_steps": 1}
    train(make_config(target_folder, file, tmp_path / "more", **settings))
