"""Training rows: what a mask sees and predicts, exactly; nothing leaks."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d3d_ray.packing import mask_first, pack, seeded
from d3d_ray.training.layout import IGNORED, BlockShape, Document, lay_out, visible

MASK = 99
SHAPE = BlockShape(block_size=4, label_shift=True, mask_token_id=MASK)
DOCUMENTS = [
    Document((1, 2, 3), (4, 5, 6, 7, 8, 9)),
    Document((11,), (12, 13, 14)),
]
ROWS = st.builds(
    lambda seed, share, shift: lay_out(
        DOCUMENTS,
        BlockShape(block_size=4, label_shift=shift, mask_token_id=MASK),
        num_anchors=5,
        seeded_share=share,
        rng=Random(seed),
    ),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)


def test_clean_rows_predict_the_answer_and_nothing_else():
    row = lay_out(DOCUMENTS, SHAPE, num_anchors=0, seeded_share=0.0, rng=Random(0))
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14]
    x = IGNORED
    assert row.labels.tolist() == [x, x, 4, 5, 6, 7, 8, 9, x, 12, 13, 14, x]
    assert row.position_ids.tolist() == [*range(9), *range(4)]


@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_block_is_the_branch_that_serving_packs(is_seeded):
    """The masks behind first slot s stand, see and predict as a branch whose t* is at s."""
    document = DOCUMENTS[0]
    tokens = (*document.prompt, *document.answer)
    row = lay_out([document], SHAPE, num_anchors=99, seeded_share=is_seeded, rng=Random(0))
    for block in range(int(row.block.max()) + 1):
        rows = (row.block == block).nonzero()[:, 0]
        slot = int(row.end_column[rows[0]]) - is_seeded
        make = seeded if is_seeded else mask_first
        guess = [tokens[slot]] if is_seeded else []
        branch = make(slot - 1, *guess, anchor_row=0, block_size=SHAPE.block_size, label_shift=True)
        packed = pack(tokens[:slot], [branch], start=0, mask_token_id=MASK)
        masks = (packed.token_ids == MASK).nonzero()[:, 0]
        assert row.position_ids[rows].tolist() == packed.position_ids[masks].tolist()
        num_seen = packed.visible[masks][:, : slot + is_seeded].sum(dim=1)
        assert num_seen.tolist() == [slot + is_seeded] * len(masks)
        drafts = packed.draft_rows[0]
        for at, draft_index in zip(rows.tolist(), row.draft_index[rows].tolist(), strict=True):
            assert draft_index == drafts.index(int(masks[rows.tolist().index(at)]))
            expected = slot + 1 + draft_index
            label = tokens[expected] if expected < len(tokens) else IGNORED
            assert row.labels[at] == label


def test_without_shift_a_mask_predicts_its_own_position():
    shape = BlockShape(block_size=4, label_shift=False, mask_token_id=MASK)
    row = lay_out(DOCUMENTS[:1], shape, num_anchors=99, seeded_share=0.5, rng=Random(3))
    tokens = (*DOCUMENTS[0].prompt, *DOCUMENTS[0].answer)
    masks = (row.block >= 0).nonzero()[:, 0].tolist()
    assert masks
    for at in masks:
        position = int(row.position_ids[at])
        expected = tokens[position] if position < len(tokens) else IGNORED
        assert row.labels[at] == expected


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_no_row_sees_what_it_predicts_nor_another_document_or_block(row):
    mask, is_clean = visible(row), row.block < 0
    document = (row.first_column > 0).long()
    for query in range(len(row.token_ids)):
        seen = mask[query].nonzero()[:, 0]
        assert (document[seen] == document[query]).all()
        seen_clean = seen[is_clean[seen]]
        seen_masks = seen[~is_clean[seen]]
        assert (row.block[seen_masks] == row.block[query]).all()
        if row.block[query] >= 0 and row.labels[query] != IGNORED:
            predicted = int(row.position_ids[seen_clean].max()) + 1
            assert row.draft_index[query] >= 0
            assert predicted <= int(row.position_ids[query]) + 1
        if is_clean[query]:
            assert seen.tolist() == list(range(int(row.first_column[query]), query + 1))


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_prompts_and_ends_have_no_weight_and_the_first_answer_token_has(row):
    for start, document in ((0, DOCUMENTS[0]), (9, DOCUMENTS[1])):
        last_of_prompt = start + len(document.prompt) - 1
        assert row.labels[last_of_prompt] == document.answer[0]
        assert (row.labels[start:last_of_prompt] == IGNORED).all()


def test_empty_documents_are_refused():
    for document in (Document((), (1,)), Document((1,), ())):
        with pytest.raises(ValueError, match="prompt and an answer"):
            lay_out([document], SHAPE, num_anchors=1, seeded_share=0.5, rng=Random(0))


def test_changing_tokens_behind_a_slot_changes_nothing_that_its_masks_see():
    row = lay_out(DOCUMENTS, SHAPE, num_anchors=6, seeded_share=0.5, rng=Random(1))
    mask = visible(row)
    for at in (row.block >= 0).nonzero()[:, 0].tolist():
        end_of_document = 9 if row.first_column[at] == 0 else 13
        behind = torch.arange(int(row.end_column[at]), end_of_document)
        assert not mask[at, behind].any()
