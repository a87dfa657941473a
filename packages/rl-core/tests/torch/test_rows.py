"""Rows reach the device in a model's layout, and results come back flat."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.images import DIGEST_BYTES, IMAGES
from rl_core.model import ENTROPY, SCORES, VALUES, logprobs_at, topk
from rl_core.torch.heads.reads import check_reads, scalar_reads
from rl_core.torch.rows import (
    idle_rows,
    mix_each_row,
    packed,
    padded,
    to_rows,
    zigzag_order,
    zigzag_slices,
    zigzag_tokens,
)

CPU = torch.device("cpu")
rows_of_tokens = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=6)


def rows_from(rows):
    return to_rows(Batch({"tokens": Ragged.from_rows(rows, dtype=np.int32)}), CPU)


@given(rows_of_tokens, st.booleans())
def test_every_layout_flattens_back(rows, is_packed):
    inputs = packed(rows_from(rows)) if is_packed else padded(rows_from(rows), pad_token_id=99)
    assert inputs.flatten(inputs.input_ids).tolist() == [token for row in rows for token in row]
    assert inputs.flatten(inputs.position_ids).tolist() == [i for row in rows for i in range(len(row))]


def test_padding_lies_on_the_right_and_is_masked():
    inputs = padded(rows_from([[5, 6], [7, 8, 9]]), pad_token_id=99)
    assert inputs.input_ids.tolist() == [[5, 6, 99], [7, 8, 9]]
    assert inputs.attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_columns_take_the_dtypes_of_the_device():
    tokens = Ragged.from_rows([[1, 2], [3]], dtype=np.int32)
    columns = {"tokens": tokens, "mask": tokens.like(np.array([1, 0, 1], np.bool_)), "weight": np.array([0.5, 2.0])}
    rows = to_rows(Batch(columns), CPU)
    assert {name: rows[name].dtype for name in columns} == {
        "tokens": torch.int64,
        "mask": torch.bool,
        "weight": torch.float32,
    }
    assert rows.spread(rows["weight"]).tolist() == [0.5, 0.5, 2.0]


@pytest.mark.parametrize(
    ("column", "message"),
    [(Ragged.from_rows([[1], [2, 3]]), "'bad' is not aligned"), (np.array(["a", "b"]), "'bad' of dtype <U1")],
)
def test_columns_that_cannot_go_are_named(column, message):
    with pytest.raises(ValueError, match=message):
        to_rows(Batch({"tokens": Ragged.from_rows([[1, 2], [3]]), "bad": column}), CPU)


def test_a_row_without_tokens_is_named():
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        rows_from([[1], [], [2]])


@given(rows_of_tokens)
def test_following_leaves_out_the_first_of_each_row(rows):
    firsts = np.cumsum([0, *map(len, rows[:-1])]).tolist()
    total = sum(map(len, rows))
    assert rows_from(rows).followers.tolist() == [index for index in range(total) if index not in firsts]


def test_values_move_one_token_on_and_scores_come_from_the_last():
    rows = rows_from([[1, 2, 3], [4], [5, 6]])
    heads = torch.arange(10.0, 16.0)
    assert scalar_reads(heads, rows, [VALUES])["values"].tolist() == [0, 10, 11, 0, 0, 14]
    assert scalar_reads(heads, rows, [SCORES])["scores"].tolist() == [12, 13, 15]


def test_reads_are_checked_against_the_role():
    check_reads("policy", [ENTROPY, topk(3)])
    check_reads("critic", [VALUES, SCORES])
    check_reads("reward_model", [VALUES, SCORES])
    with pytest.raises(ValueError, match="reward_model cannot read entropy"):
        check_reads("reward_model", [ENTROPY])
    with pytest.raises(ValueError, match="one topk"):
        check_reads("teacher", [topk(2), topk(3)])
    with pytest.raises(ValueError, match="one column"):
        check_reads("policy", [logprobs_at("a"), logprobs_at("b")])
    with pytest.raises(ValueError, match="name of the column"):
        logprobs_at("")


def test_an_idle_row_is_a_row():
    assert len(idle_rows(CPU)) == 1
    assert idle_rows(CPU, ["ids"])["ids"].tolist() == [[-1], [-1]]
    assert packed(idle_rows(CPU)).input_ids.shape == (1, 2)


def with_images(counts):
    digests = [np.zeros((count, DIGEST_BYTES), np.uint8) for count in counts]
    return Batch(
        {"tokens": Ragged.from_rows([[1, 2], [3]]), IMAGES: Ragged.from_rows(digests, np.uint8, (DIGEST_BYTES,))}
    )


def test_images_are_refused_by_a_model_that_sees_none():
    with pytest.raises(ValueError, match="row 1 has 2 images, but this model is used as a language model"):
        to_rows(with_images([0, 2]), CPU)
    assert IMAGES not in to_rows(with_images([0, 0]), CPU).columns


def test_images_are_replaced_by_the_columns_that_a_model_makes_of_them():
    made = {"pixels": np.ones((5, 3), np.float32), "bits": np.array([1, 2, 3], np.int16)}
    rows = to_rows(with_images([1, 0]), CPU, images=lambda batch: made)
    assert rows["pixels"].shape == (5, 3)
    assert rows["bits"].dtype == torch.int16
    assert set(rows.columns) == {"tokens", "pixels", "bits"}


def test_each_rank_has_a_slice_from_the_start_and_its_mirror_from_the_end():
    assert zigzag_slices(12, 3, 0) == ((0, 2), (10, 12))
    assert zigzag_tokens(12, 3, 1).tolist() == [2, 3, 8, 9]
    assert zigzag_tokens(7, 1, 0).tolist() == list(range(7))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_have_every_token_once_and_attend_to_as_many(size):
    length = 2 * size * 3
    assert zigzag_order(length, size).sort().values.tolist() == list(range(length))
    seen = [int((zigzag_tokens(length, size, rank) + 1).sum()) for rank in range(size)]
    assert len(set(seen)) == 1
    joined = torch.cat([zigzag_tokens(length, size, rank) for rank in range(size)])
    assert torch.equal(zigzag_order(length, size), joined)


def test_a_row_that_cannot_be_cut_into_equal_slices_is_refused():
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 4 equal slices"):
        zigzag_tokens(10, 2, 0)


LENGTHS = (5, 1, 17, 2, 16, 33, 3)


def test_rows_end_to_end_are_mixed_as_rows_alone_and_so_are_gradients():
    torch.manual_seed(0)
    gru = nn.GRU(4, 3, batch_first=True).double()
    tokens = torch.randn(sum(LENGTHS), 4, dtype=torch.float64, requires_grad=True)
    mixed = mix_each_row(lambda rows: gru(rows)[0], tokens, LENGTHS)
    seen = torch.randn_like(mixed)
    found = torch.autograd.grad(mixed, [tokens, *gru.parameters()], seen)
    alone = torch.cat([gru(row)[0] for row in tokens.split(LENGTHS)])
    assert torch.allclose(mixed, alone, atol=1e-13)
    for ours, expected in zip(found, torch.autograd.grad(alone, [tokens, *gru.parameters()], seen), strict=True):
        assert torch.allclose(ours, expected, atol=1e-12)


def test_less_than_half_of_what_is_mixed_is_padding():
    sizes = []

    def mix(rows):
        sizes.append(rows.shape[:2].numel())
        return rows

    lengths = (*LENGTHS, 1000, *[7] * 50)
    mix_each_row(mix, torch.zeros(sum(lengths), 4), lengths)
    assert sum(sizes) < 2 * sum(lengths)
