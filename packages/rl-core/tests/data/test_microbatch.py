"""Every row goes somewhere once, budgets hold, and ranks are balanced."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.data.batch import Batch
from rl_core.data.microbatch import BUBBLE, MIN_TOKENS, Batching, Pipeline, plan_microbatches, shard
from rl_core.data.ragged import Ragged
from rl_core.model_config import DynamicBatchingConfig, ModelConfig, SequencePackingConfig

lengths_of_rows = st.lists(st.integers(1, 50), max_size=40)


@st.composite
def grouped_rows(draw):
    lengths = draw(lengths_of_rows)
    ids = st.integers(0, max(len(lengths), 1))
    groups = draw(st.none() | st.lists(ids, min_size=len(lengths), max_size=len(lengths)))
    return lengths, groups


def units(lengths, groups):
    """Rows that must stay together."""
    ids = range(len(lengths)) if groups is None else groups
    return [[row for row, id_ in enumerate(ids) if id_ == unit] for unit in dict.fromkeys(ids)]


def assert_partition(parts, lengths, groups):
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        assert part.dtype == np.int64
        assert part.tolist() == sorted(part.tolist())
    place = {row: index for index, part in enumerate(parts) for row in part.tolist()}
    for unit in units(lengths, groups):
        assert len({place[row] for row in unit}) == 1


@given(grouped_rows(), st.integers(1, 5))
def test_shards_hold_every_row_once_and_differ_by_at_most_one_unit(rows, num_shards):
    lengths, groups = rows
    shards = shard(lengths, num_shards, groups)
    assert len(shards) == num_shards
    assert_partition(shards, lengths, groups)
    tokens = [sum(lengths[row] for row in part) for part in shards]
    longest = max((sum(lengths[row] for row in unit) for unit in units(lengths, groups)), default=0)
    assert max(tokens) - min(tokens) <= longest


@given(grouped_rows(), st.integers(1, 5))
def test_the_largest_unit_goes_first_and_each_to_the_lightest_shard(rows, num_shards):
    lengths, groups = rows
    shards = [[] for _ in range(num_shards)]
    for unit in sorted(units(lengths, groups), key=lambda unit: (-sum(lengths[row] for row in unit), unit[0])):
        lightest = min(shards, key=lambda held: (sum(lengths[row] for row in held), len(held)))
        lightest.extend(unit)
    assert [part.tolist() for part in shard(lengths, num_shards, groups)] == [sorted(held) for held in shards]


def test_equal_rows_are_spread_evenly():
    assert [len(part) for part in shard([7] * 10, 4)] == [3, 3, 2, 2]


def test_shards_are_the_same_every_time():
    lengths = np.random.default_rng(0).integers(1, 9, 100)
    first, second = shard(lengths, 3), shard(lengths, 3)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(grouped_rows(), st.integers(1, 80), st.booleans(), st.integers(0, 12))
def test_token_budgets_hold_unless_a_unit_alone_exceeds_them(rows, max_tokens, padded, min_count):
    lengths, groups = rows
    plan = plan_microbatches(lengths, max_tokens=max_tokens, padded=padded, min_count=min_count, groups=groups)
    assert len(plan) >= min_count
    assert_partition(plan, lengths, groups)
    for part in plan:
        sizes = [lengths[row] for row in part]
        cost = len(sizes) * max(sizes, default=0) if padded else sum(sizes)
        assert cost <= max_tokens or part.tolist() in units(lengths, groups)


@given(grouped_rows(), st.integers(1, 80), st.integers(0, 12))
def test_even_microbatches_hold_every_row_within_the_budget(rows, max_tokens, min_count):
    lengths, groups = rows
    plan = plan_microbatches(lengths, max_tokens=max_tokens, min_count=min_count, even=True, groups=groups)
    assert len(plan) >= min_count
    assert_partition(plan, lengths, groups)
    tokens = [sum(lengths[row] for row in part) for part in plan]
    assert all(
        total <= max_tokens or part.tolist() in units(lengths, groups) for total, part in zip(tokens, plan, strict=True)
    )


def test_even_microbatches_hold_about_as_many_tokens():
    lengths = np.random.default_rng(0).integers(300, 1100, 64)
    even, filled = (
        [int(lengths[part].sum()) for part in plan_microbatches(lengths, max_tokens=8192, min_count=6, even=even)]
        for even in (True, False)
    )
    assert len(even) == len(filled) == 6
    assert max(even) - min(even) <= lengths.min()
    assert max(filled) - min(filled) > lengths.max()


@given(grouped_rows(), st.integers(1, 8), st.integers(0, 12))
def test_row_budgets_hold_unless_a_unit_alone_exceeds_them(rows, max_rows, min_count):
    lengths, groups = rows
    plan = plan_microbatches(lengths, max_rows=max_rows, min_count=min_count, groups=groups)
    assert len(plan) >= min_count
    assert_partition(plan, lengths, groups)
    assert all(len(part) <= max_rows or part.tolist() in units(lengths, groups) for part in plan)


@given(lengths_of_rows.filter(bool), st.integers(1, 80))
def test_packing_wastes_less_than_half(lengths, max_tokens):
    plan = plan_microbatches(lengths, max_tokens=max_tokens)
    tokens = sorted(sum(lengths[row] for row in part) for part in plan)
    assert all(a + b > max_tokens for a, b in pairwise(tokens))


def test_dynamic_batching_puts_like_lengths_together():
    plan = plan_microbatches([9, 1, 10, 2, 1], max_tokens=20, padded=True)
    assert [part.tolist() for part in plan] == [[0, 2], [1, 3, 4]]


def test_empty_microbatches_come_only_where_units_run_out():
    plan = plan_microbatches([5, 6, 7], max_tokens=100, min_count=5)
    assert [len(part) for part in plan] == [1, 1, 1, 0, 0]


def test_no_rows_make_no_microbatches():
    assert plan_microbatches([], max_tokens=4) == []
    assert [part.tolist() for part in plan_microbatches([], max_rows=4, min_count=2)] == [[], []]


@pytest.mark.parametrize("budgets", [{}, {"max_tokens": 3, "max_rows": 3}])
def test_exactly_one_budget_is_needed(budgets):
    with pytest.raises(ValueError, match="one of max_tokens and max_rows"):
        plan_microbatches([1], **budgets)


def test_groups_must_fit_the_rows():
    with pytest.raises(ValueError, match="one id per row"):
        shard([1, 2], 2, [0])


def test_a_config_says_how_rows_are_batched():
    packing, off = SequencePackingConfig(train_mb_tokens=64), SequencePackingConfig(enabled=False)
    dynamic = DynamicBatchingConfig(enabled=True, logprob_mb_tokens=32)
    config = ModelConfig(
        model_name="m",
        sequence_packing=packing,
        train_micro_batch_size=3,
        logprob_batch_size=5,
        max_total_sequence_length=10,
    )
    assert Batching.of(config, training=True) == Batching(packed=True, max_tokens=64, max_rows=None)
    assert Batching.of(config, training=False) == Batching(packed=True, max_tokens=50, max_rows=None)
    plain = config.model_copy(update={"sequence_packing": off})
    assert Batching.of(plain, training=True) == Batching(packed=False, max_tokens=None, max_rows=3)
    padded = plain.model_copy(update={"dynamic_batching": dynamic})
    assert Batching.of(padded, training=True) == Batching(packed=False, max_tokens=30, max_rows=None)
    assert Batching.of(padded, training=False) == Batching(packed=False, max_tokens=32, max_rows=None)
    with pytest.raises(ValueError, match="both enabled"):
        Batching.of(config.model_copy(update={"dynamic_batching": dynamic}), training=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.sampled_from([1, 4]))
def test_rows_that_fill_multiples_stay_within_the_budget(lengths, multiple):
    batch = Batch({"tokens": Ragged.from_rows([[1] * length for length in lengths])})
    batching = Batching(packed=True, max_tokens=32, max_rows=None, row_multiple=multiple)
    assert batching.is_fixed
    plan = batching.plan(batch)
    assert np.array_equal(np.sort(np.concatenate(plan)), np.arange(len(lengths)))
    assert all(sum(-(-lengths[row] // multiple) * multiple for row in part) <= 32 for part in plan)


def test_pairs_share_a_microbatch():
    batch = Batch({"tokens": Ragged.from_rows([[1] * 3] * 4), "pair": np.array([7, 8, 8, 7])})
    plan = Batching(packed=True, max_tokens=6, max_rows=None).plan(batch)
    assert sorted(part.tolist() for part in plan) == [[0, 3], [1, 2]]


def waiting(size: int, num_chunks: int, num_microbatches: int) -> Fraction:
    """The share of a forward pass for which a rank waits, stage by stage: each takes one unit of time."""
    stages, done = size * num_chunks, {}
    free = [0] * size
    # a rank runs `size` microbatches through one stage, then through its next
    order = [
        (chunk, first + offset)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for offset in range(min(size, num_microbatches - first))
    ]
    pending = [list(order) for _ in range(size)]
    while any(pending):
        for rank in range(size):
            while pending[rank]:
                chunk, microbatch = pending[rank][0]
                stage = chunk * size + rank
                if stage and (stage - 1, microbatch) not in done:
                    break
                begin = max(free[rank], done[stage - 1, microbatch] if stage else 0)
                done[stage, microbatch] = free[rank] = begin + 1
                pending[rank].pop(0)
    assert len(done) == stages * num_microbatches
    return 1 - Fraction(num_chunks * num_microbatches, max(done.values()))


@pytest.mark.parametrize(
    ("size", "num_chunks", "num_microbatches"), [(1, 1, 3), (2, 1, 1), (4, 1, 6), (4, 2, 8), (16, 4, 16), (16, 1, 2)]
)
def test_the_bubble_is_the_time_for_which_ranks_wait(size, num_chunks, num_microbatches):
    found = Pipeline(size, num_chunks).bubble(num_microbatches)
    assert found == pytest.approx(float(waiting(size, num_chunks, num_microbatches)))


@pytest.mark.parametrize(("size", "num_chunks"), [(2, 1), (8, 1), (16, 1), (8, 2), (16, 4)])
def test_enough_rows_keep_the_bubble_small_with_no_more_microbatches_than_that_takes(size, num_chunks):
    pipeline = Pipeline(size, num_chunks)
    count = pipeline.wanted(10_000, 10_000 * MIN_TOKENS)
    assert pipeline.bubble(count) <= BUBBLE < pipeline.bubble(count - 1)


def test_few_rows_and_short_ones_are_not_split_further():
    pipeline = Pipeline(8)
    assert pipeline.wanted(5, 10**6) == 5
    assert pipeline.wanted(100, 7 * MIN_TOKENS) == 7
    assert pipeline.wanted(100, 3) == pipeline.wanted(0, 0) == 1
    assert Pipeline().wanted(10**6, 10**9) == 1


def test_interleaved_stages_round_up():
    assert Pipeline(4, 2).rounded(5) == 8
    assert Pipeline(4).rounded(5) == 5


def planned(lengths, pipeline, max_tokens=8192):
    """Tokens of each microbatch of a rank."""
    batch = Batch({"tokens": Ragged.from_rows([np.ones(length, np.int32) for length in lengths])})
    batching = Batching(packed=True, max_tokens=max_tokens, max_rows=None)
    count = max(len(batching.plan(batch)), pipeline.wanted(batching.num_units(batch), int(lengths.sum())))
    plan = batching.plan(batch, pipeline.rounded(count), even=pipeline.size > 1)
    return [int(lengths[part].sum()) for part in plan]


@pytest.mark.parametrize(("num_chunks", "limit"), [(1, 0.49), (4, 0.25)])
def test_a_deep_pipeline_with_few_rows_waits_little_if_its_stages_are_interleaved(num_chunks, limit):
    """671 billion parameters on 16 pipeline ranks, 512 rows of about 700 tokens over 32 data-parallel ranks."""
    lengths = np.random.default_rng(0).integers(500, 900, 512)
    own = lengths[shard(lengths, 32)[0]]
    pipeline = Pipeline(16, num_chunks)
    tokens = planned(own, pipeline)
    assert len(tokens) == 16  # every row for itself: it was 2 by the budget alone
    assert pipeline.bubble(len(tokens)) < limit
    assert pipeline.bubble(2) > 0.65


def test_microbatches_of_a_pipeline_are_even():
    lengths = np.random.default_rng(1).integers(200, 2000, 200)
    tokens = planned(lengths, Pipeline(4), max_tokens=2**15)
    assert len(tokens) == Pipeline(4).wanted(200, int(lengths.sum()))
    assert max(tokens) < 1.05 * min(tokens)
