"""The number of microbatches in a pipeline, and the time for which its ranks wait."""

from fractions import Fraction

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Batching, shard
from rl_core.data.pipeline import BUBBLE, FEWEST_TOKENS, Pipeline
from rl_core.data.ragged import Ragged


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
    count = pipeline.wanted(10_000, 10_000 * FEWEST_TOKENS)
    assert pipeline.bubble(count) <= BUBBLE < pipeline.bubble(count - 1)


def test_few_rows_and_short_ones_are_not_split_further():
    pipeline = Pipeline(8)
    assert pipeline.wanted(5, 10**6) == 5
    assert pipeline.wanted(100, 7 * FEWEST_TOKENS) == 7
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
