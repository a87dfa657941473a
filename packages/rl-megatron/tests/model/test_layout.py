"""Rows of a microbatch in one sequence, as long as they need or of a fixed length."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.data.batch import TOKENS
from rl_core.torch.loss import Rows
from rl_megatron.model.layout import PADDING_ROW, Alignment, lay_out


def rows_of(lengths):
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(1, offsets[-1] + 1)
    columns = {TOKENS: tokens}
    return Rows.laid_out(torch.as_tensor(offsets), {TOKENS: torch.as_tensor(tokens)}, offsets, columns)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    context=st.sampled_from([1, 2, 4]),
    sequence=st.sampled_from([1, 2]),
    budgets=st.lists(st.integers(1, 3000), min_size=1, max_size=2),
)
def test_padding_is_in_rows_of_its_own(lengths, context, sequence, budgets):
    found = set()
    for rank in range(context):
        alignment = Alignment(context, rank, sequence, budgets=tuple(budgets))
        layout = lay_out(rows_of(lengths), alignment, packed=True)
        (length,) = {layout.input_ids.shape[1] * context, layout.position_ids.shape[1] * context}
        places = layout.places.tolist()
        found.update(place for place in places if place >= 0)
        assert layout.input_ids.flatten().tolist() == [place + 1 for place in places]
        ends = layout.packing.cu_seqlens_q
        assert int(ends[-1]) == length
        each = ends.diff().tolist()
        assert all(size % alignment.row == 0 for size in each)
        # rows of padding follow the others, and none is longer than it must be
        own = [-(-size // alignment.row) * alignment.row for size in lengths]
        assert each[: len(own)] == own
        assert max(each[len(own) :], default=0) <= max(*own, PADDING_ROW + alignment.row)
        assert layout.packing.max_seqlen_q == max(each)
        fitting = [size for size in alignment.lengths if size >= sum(own)]
        assert length == fitting[0] if fitting else length % alignment.lengths[-1] == 0
        plain = lay_out(rows_of(lengths), Alignment(context, rank, sequence), packed=True)
        held = [(layout.position_ids.flatten()[at], place) for at, place in enumerate(places) if place >= 0]
        assert held == [
            (plain.position_ids.flatten()[at], place) for at, place in enumerate(plain.places.tolist()) if place >= 0
        ]
    assert found == set(range(sum(lengths)))


@pytest.mark.parametrize(("tokens", "length"), [(1, 104), (104, 104), (105, 200), (200, 200), (201, 400)])
def test_a_microbatch_gets_the_smallest_length_that_holds_it(tokens, length):
    assert Alignment(context_size=2, sequence_size=2, budgets=(200, 100)).length_of(tokens) == length
