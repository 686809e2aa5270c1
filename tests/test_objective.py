"""The training loss: its weights, what it cannot see, and the same value on every backend."""

import copy
from random import Random

import pytest
import torch
from tiny import FAMILIES, MASK, tiny_drafter
from torch.nn.functional import cross_entropy

from d3d_ray.training import objective
from d3d_ray.training.layout import IGNORED, BlockShape, Document, TrainingRow, lay_out, pad_rows
from d3d_ray.training.objective import combine, default_gamma, row_losses
from d3d_ray.training.step import DrafterLoss, Weights, run

SHAPE = BlockShape(block_size=4, label_shift=True, mask_token_id=MASK)
DOCUMENTS = [
    Document(tuple(range(10, 20)), tuple(range(30, 60))),
    Document((5, 6), tuple(range(100, 130))),
]
WEIGHTS = Weights(gamma=4.0, ar_weight=0.5, soft_weight=0.0, num_drafts=3)


def make_row(documents: list[Document] = DOCUMENTS, seed: int = 0) -> TrainingRow:
    return lay_out(documents, SHAPE, num_anchors=20, seeded_share=0.5, rng=Random(seed))


def test_later_drafts_weigh_less_and_the_clean_stream_weighs_lambda():
    losses = torch.tensor([1.0, 2.0, 5.0, 3.0])
    parts = combine(losses, torch.tensor([0, 1, -1, -1]), gamma=2.0, ar_weight=0.25, num_drafts=3)
    decay = torch.exp(torch.tensor(-0.5))
    expected = (1.0 + 2.0 * decay) / (1.0 + decay)
    torch.testing.assert_close(parts.denoising, expected)
    assert float(parts.autoregressive) == 4.0
    torch.testing.assert_close(parts.total, expected + 0.25 * 4.0)
    assert parts.by_draft.tolist()[:2] == [1.0, 2.0]
    assert parts.by_draft[2].isnan()


def test_a_row_without_masks_has_no_denoising_loss():
    parts = combine(torch.tensor([2.0]), torch.tensor([-1]), gamma=4.0, ar_weight=1.0, num_drafts=2)
    assert (float(parts.denoising), float(parts.total)) == (0.0, 2.0)


def test_soft_targets_are_the_target_s_law_renormalised():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator)
    labels = torch.tensor([3, 0, 7, 7, 10])
    hard = row_losses(logits, labels)
    torch.testing.assert_close(hard, cross_entropy(logits, labels, reduction="none"))
    one = {"top_ids": labels[:, None], "top_log_probs": torch.full((5, 1), -0.3)}
    torch.testing.assert_close(row_losses(logits, labels, soft_weight=1.0, **one), hard)
    ids = torch.stack([labels, (labels + 1) % 11], dim=1)
    law = torch.tensor([0.6, 0.2]).log().expand(5, 2)
    both = {"top_ids": ids, "top_log_probs": law}
    other = row_losses(logits, ids[:, 1])
    soft = row_losses(logits, labels, soft_weight=1.0, **both)
    torch.testing.assert_close(soft, 0.75 * hard + 0.25 * other)
    mixed = row_losses(logits, labels, soft_weight=0.5, **both)
    torch.testing.assert_close(mixed, 0.5 * hard + 0.5 * soft)


def test_soft_targets_stand_at_the_label_s_place():
    documents = [
        Document(
            document.prompt,
            document.answer,
            torch.tensor(document.answer)[:, None],
            torch.zeros(len(document.answer), 1),
        )
        for document in DOCUMENTS
    ]
    row = make_row(documents)
    at = row.labels != IGNORED
    assert row.top_ids is not None
    assert torch.equal(row.top_ids[row.label_column[at]][:, 0], row.labels[at])
    assert bool((row.label_column[~at] == -1).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_flex_and_plain_attention_give_the_loss_of_sdpa(family):
    network, row = tiny_drafter(family).network, make_row()
    reference = DrafterLoss(copy.deepcopy(network), WEIGHTS)
    expected = reference(row)
    expected[0].backward()
    flex = DrafterLoss(copy.deepcopy(network), WEIGHTS, attention="flex")
    with torch.no_grad():  # Torch has no backward pass of it on the CPU.
        for padded in (row, pad_rows(row, 256)):
            for mine, theirs in zip(flex(padded), expected, strict=True):
                torch.testing.assert_close(mine, theirs.detach(), atol=1e-5, rtol=1e-5)
    dense = DrafterLoss(
        copy.deepcopy(network), WEIGHTS, attention="dense", is_checkpointed=True
    ).train()
    loss = dense(row)
    torch.testing.assert_close(loss[0], expected[0], atol=1e-5, rtol=1e-5)
    loss[0].backward()
    for mine, theirs in zip(dense.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_the_head_in_chunks_gives_the_same_loss_and_gradients(monkeypatch):
    network, row = tiny_drafter().network, make_row()
    results = []
    for num_bytes in (2**29, 7 * 4 * 512):
        monkeypatch.setattr(objective, "_HEAD_BYTES", num_bytes)
        module = DrafterLoss(copy.deepcopy(network), WEIGHTS)
        loss = module(row)[0]
        loss.backward()
        results.append((loss, [p.grad for p in module.parameters()]))
    (whole, whole_grads), (chunked, chunked_grads) = results
    torch.testing.assert_close(chunked, whole)
    for mine, theirs in zip(chunked_grads, whole_grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change_at", [12, 25, 38])
def test_changing_tokens_behind_an_anchor_changes_no_earlier_block(change_at):
    """In the first document and in the second, which never sees the first."""
    network = tiny_drafter().network
    tokens = [*DOCUMENTS[0].prompt, *DOCUMENTS[0].answer]
    changed = tokens[:change_at] + [(t + 211) % 400 + 4 for t in tokens[change_at:]]
    other = [Document(tuple(changed[:10]), tuple(changed[10:])), DOCUMENTS[1]]
    before, after = make_row(), make_row(other)
    losses = []
    for row in (before, after):
        with torch.inference_mode():
            logits = network.head(run(network, row))
        losses.append(row_losses(logits, row.labels.clamp(min=0)))
    is_second = before.first_column == len(tokens)
    is_earlier = (before.end_column <= change_at) & (before.label_column < change_at)
    same = (before.labels != IGNORED) & (is_second | is_earlier)
    assert same.sum() > 10 and (~same).sum() > 10
    assert torch.equal(losses[0][same], losses[1][same])
    is_later = (before.end_column > change_at) & ~is_second & (before.labels != IGNORED)
    assert bool((losses[0][is_later] != losses[1][is_later]).any())


def test_gamma_follows_the_block_size():
    assert [default_gamma(size) for size in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert default_gamma(4) == 2.0
