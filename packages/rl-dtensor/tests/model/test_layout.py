"""Which tokens of some rows a rank has."""

import pytest
import torch
from transformers import AutoConfig

from rl_core.data.batch import TOKENS
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.selfcheck import LENGTHS
from rl_core.torch.loss import Rows
from rl_dtensor.model.layout import Alignment, Context, Segment, Segments, lay_out
from rl_dtensor.selfcheck import CHECK, write_tiny


def rows_of(lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Rows(offsets, {TOKENS: torch.arange(int(offsets[-1]))})


def test_bounds_of_segments_are_those_of_their_queries_and_keys():
    segments = Segments([Segment((0, 2), (0, 2)), Segment((2, 5), (2, 5))], torch.device("cpu"))
    assert segments.query_ends.tolist() == segments.key_ends.tolist() == [0, 2, 5]
    assert segments.keys is None
    split = Segments([Segment((0, 2), (0, 2)), Segment((2, 3), (2, 7))], torch.device("cpu"))
    assert split.query_ends.tolist() == [0, 2, 3]
    assert split.key_ends.tolist() == [0, 2, 7]
    assert split.keys.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert split.longest == (2, 5)
    first, last = split.seen_keys
    assert first.tolist() == [0, 0, 2]
    assert last.tolist() == [0, 1, 6]


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_chunks_start_with_their_row_wherever_queries_are_cut(size):
    row, whole = (2, 11), torch.device("cpu")
    items = [Segment((0, 2), (0, 2)), Segment((2, 5), (row[0], 7)), Segment((5, 9), row)]
    segments = Segments(items, whole).chunked(size)
    first, last = segments.seen_keys
    place = torch.tensor([0, 1, 4, 5, 6, 7, 8, 9, 10])
    start = torch.tensor([0, 0, *[row[0]] * 7])
    assert torch.equal(last, place)
    assert torch.equal(first, place - (place - start) % size)
    assert Segments(items, whole).chunked(100).lengths == Segments(items, whole).lengths


@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_ranks_have_all_tokens_between_them_and_find_their_keys(method):
    lengths, size = (5, 4, 3), 2
    whole = rows_of(lengths)
    parts = [lay_out(whole, Alignment(2 * size, Context(None, rank, size, method)), is_packed=True) for rank in (0, 1)]
    in_order_of_ranks = torch.cat([part.places for part in parts])
    for part in parts:
        assert torch.equal(in_order_of_ranks[part.key_places], torch.arange(12))
        assert torch.equal(part.rank_places[part.key_places], torch.arange(12))
        first, last = part.segments.seen_keys
        seen = part.places if method == "all_gather" else torch.arange(12)
        starts = whole.offsets[whole.row_of_token]
        assert torch.equal(first, starts[seen])
        assert torch.equal(last, seen)


@pytest.mark.parametrize(
    "settings", [{}, {"recompute": "full"}, {"context_parallel_size": 2}], ids=["plain", "kept", "split"]
)
def test_a_layout_is_worked_out_once_per_microbatch(ranks, tmp_path, settings):
    """Not by each layer, nor when a layer is computed again."""
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=max(LENGTHS), logprob_mb_tokens=max(LENGTHS))
    config = ModelConfig(model_name=str(folder), precision="float32", sequence_packing=packing)
    num_ranks = settings.get("context_parallel_size", 1)
    batch = CHECK.batch(0)
    with PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), num_ranks, **settings) as model:
        for run in (lambda: model.infer(batch, [LOGPROBS]), lambda: model.train_step(batch, TokenLoss())):
            ranks.run("dtensor_factories:count_layouts", [()] * num_ranks)
            try:
                run()
            finally:
                counts = ranks.run("dtensor_factories:num_layouts", [()] * num_ranks)
            assert counts == [3] * num_ranks  # microbatches of 17 tokens for 51


def test_rows_share_the_tokens_that_they_begin_with():
    tokens = torch.tensor([1, 2, 3, 4, 1, 2, 3, 1, 2, 3, 5, 6])
    rows = Rows(torch.tensor([0, 4, 7, 12]), {TOKENS: tokens})
    layout = lay_out(rows, Alignment(4), is_packed=True, shares_prefixes=True)
    assert layout.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1]]
    # The shortest row is first, and another row continues it.
    assert layout.places.tolist() == [4, 5, 6, 3, 10, 11, -1, -1]
    assert layout.bounds == ((0, 4), (4, 6), (6, 8))
    assert layout.segments.keys.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7]
    # Each token is read once, and its results are those of all rows that have it.
    held = layout.held
    assert torch.equal(layout.input_ids[0, held.positions], tokens[held.tokens])
    assert torch.equal(layout.input_ids[0, held.followed], tokens[held.followers - 1])
    assert held.originals.tolist() == [4, 5, 6, 3, 4, 5, 6, 4, 5, 6, 10, 11]
    assert sorted(held.followers.tolist()) == [3, 5, 6, 10, 11]


def test_results_with_columns_of_their_own_are_read_of_each_row():
    rows = Rows(torch.tensor([0, 3, 6]), {TOKENS: torch.tensor([1, 2, 3, 1, 2, 4])})
    layout = lay_out(rows, Alignment(), is_packed=True, shares_prefixes=True, reads_columns=True)
    assert layout.input_ids.tolist() == [[1, 2, 3, 4]]
    assert layout.held.originals is None
    assert layout.held.followed.tolist() == [0, 1, 0, 1]
    assert layout.held.followers.tolist() == [1, 2, 4, 5]


def test_tokens_are_shared_if_rows_agree_in_all_columns_that_they_are_computed_from():
    experts = torch.tensor([[1], [2], [3], [1], [0], [3]])
    rows = Rows(torch.tensor([0, 3, 6]), {TOKENS: torch.tensor([1, 2, 3, 1, 2, 3]), "experts": experts})
    layout = lay_out(rows, Alignment(), is_packed=True, shares_prefixes=True, inputs=["experts"])
    assert layout.input_ids.tolist() == [[1, 2, 3, 2, 3]]


@pytest.mark.parametrize("second", [[4, 5, 6], [1, *range(30, 50)]])
def test_rows_that_share_little_are_laid_out_one_after_another(second):
    first = [1, *range(10, 30)]
    rows = Rows(torch.tensor([0, 21, 21 + len(second)]), {TOKENS: torch.tensor([*first, *second])})
    layout = lay_out(rows, Alignment(), is_packed=True, shares_prefixes=True)
    assert layout.tree is None
    assert layout.input_ids.tolist() == [[*first, *second]]
    assert layout.segments.keys is None
