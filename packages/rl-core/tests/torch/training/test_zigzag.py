"""Slices of rows on context-parallel ranks."""

import pytest
import torch

from rl_core.torch.training.zigzag import zigzag_order, zigzag_slices, zigzag_tokens


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
