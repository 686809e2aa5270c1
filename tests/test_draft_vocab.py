"""A drafter that can draft only some tokens: the same answers, a smaller head."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from loops import make_request, run
from tiny import MASK, save_tiny, tiny_drafter
from training_runs import as_worker, make_config, write_answers

from d3d_ray.decode.lookahead_plans import AnytimePlan
from d3d_ray.models.drafter_folder import load_drafter, save_drafter
from d3d_ray.models.loading import load_target
from d3d_ray.training.layout import IGNORED, BlockShape, Document, lay_out
from d3d_ray.training.step import DrafterLoss, Weights

CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
DRAFTED = torch.tensor([2, 4, 9, *range(30, 300, 3)])


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "llama", tie_word_embeddings=True)
    return folder


def test_the_columns_of_the_logits_are_those_of_the_whole_head() -> None:
    drafter = tiny_drafter()
    hidden = torch.randn(5, drafter.network.config.hidden_size)
    whole = drafter.network.head(hidden)
    drafter.network.trim_head(DRAFTED)
    torch.testing.assert_close(drafter.network.head(hidden), whole[:, DRAFTED])


@pytest.mark.parametrize("bits", [None, 8])
def test_a_folder_keeps_what_can_be_drafted(
    target_folder: Path, tmp_path: Path, bits: int | None
) -> None:
    target = str(target_folder)
    options = {"target_source": target, "block_size": 4, "mask_token_id": MASK}
    drafter = load_drafter(None, **options, **CPU)
    drafter.network.trim_head(DRAFTED)
    drafter.section = replace(drafter.section, is_trained=True)
    save_drafter(drafter, tmp_path, target_source=target, bits=bits)
    again = load_drafter(str(tmp_path), target_source=target, **CPU)
    assert again.draft_ids is not None and torch.equal(again.draft_ids, DRAFTED)
    assert again.section.draft_vocab_size == len(DRAFTED)
    assert again.network.trimmed_head is not None
    torch.testing.assert_close(
        again.network.trimmed_head.weight, again.network.model.lm_head.weight[DRAFTED]
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_those_tokens_are_drafted_and_the_answer_is_the_target_s(
    target_folder: Path, temperature: float
) -> None:
    from d3d_ray.training.evaluation import InlineDrafter

    target = load_target(str(target_folder), **CPU)
    drafter = load_drafter(
        None, target_source=str(target_folder), block_size=4, mask_token_id=MASK, **CPU
    )
    drafter.network.trim_head(DRAFTED)
    plan = AnytimePlan(drafter, max_rows=64, is_noise_shared=True, max_passes=3)
    offered: set[int] = set()
    passes = plan.passes

    def watch(work: Any) -> Any:
        for offer in passes(work):
            offered.update(token for branch in offer.branches for token in branch.drafts)
            yield offer

    plan.passes = watch  # type: ignore[method-assign]
    request = make_request(prompt=(20, 31, 42), temperature=temperature)
    settings: dict[str, Any] = {"vocab_size": target.vocab_size, "max_wait_s": 60.0}
    drafted = run(target, InlineDrafter(plan), [request], **settings)
    plain = run(target, None, [make_request(prompt=(20, 31, 42), temperature=temperature)])
    assert drafted.tokens("a") == plain.tokens("a")
    assert offered and offered <= set(DRAFTED.tolist())


def test_a_label_that_cannot_be_drafted_has_no_loss_and_the_others_have_theirs() -> None:
    drafter = tiny_drafter()
    shape = BlockShape(block_size=4, label_shift=True, mask_token_id=MASK)
    answer = tuple(DRAFTED[torch.randint(3, 90, (30,))].tolist())
    weights = Weights(gamma=4.0, ar_weight=0.5, soft_weight=0.0, num_drafts=3)

    def losses(answer: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        document = Document((5, 6), answer)
        row = lay_out([document], shape, num_anchors=6, seeded_share=0.5, rng=Random(0))
        loss = DrafterLoss(drafter.network, weights)
        columns = loss._columns(row.labels)
        return loss(row)[2], int(((row.labels != IGNORED) & (columns == IGNORED)).sum())

    drafter.network.trim_head(DRAFTED)
    _, num_lost = losses(answer)
    assert num_lost == 0
    # The last token is seen by no row that predicts, so only its own rows lose their loss.
    inside, _ = losses(answer)
    outside, num_lost = losses((*answer[:-1], 7))
    assert num_lost >= 1
    assert not torch.equal(inside, outside) and bool(outside.isfinite())


def test_the_trainer_keeps_the_tokens_that_answers_use_most(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_worker(monkeypatch)
    from d3d_ray.training.setup import load_drafter_for
    from d3d_ray.training.trainer import train

    file = tmp_path / "a.jsonl"
    write_answers(file)
    config = make_config(
        target_folder,
        file,
        tmp_path / "run",
        objective={"draft_vocab_size": 50},
        optimiser={"num_steps": 2},
    )
    train(config)
    folder = str(tmp_path / "run" / "drafter")
    drafter = load_drafter(folder, target_source=str(target_folder), **CPU)
    assert drafter.draft_ids is not None and len(drafter.draft_ids) == 50
    again = replace(config, drafter=replace(config.drafter, source=folder, block_size=None))
    kept = load_drafter_for(again).draft_ids
    assert kept is not None and torch.equal(kept, drafter.draft_ids)
    fewer = replace(again, objective=replace(again.objective, draft_vocab_size=40))
    with pytest.raises(ValueError, match="drafts 50 tokens already"):
        load_drafter_for(fewer)
    with pytest.raises(ValueError, match="train_head=false"):
        load_drafter_for(
            replace(
                config,
                objective=replace(config.objective, train_head=True, train_embeddings=True),
            )
        )
