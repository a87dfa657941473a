"""Counts of drafts leave out what was drafted past the end of a completion."""

import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from rl_vllm.engine.speculation import DraftCounts


def request_of(counts, steps, *, num_kept):
    """Follow a request through its steps: pairs of drafted and accepted tokens, `num_kept` of the last one's tokens."""
    metrics = RequestSpecDecodeMetrics.new(3)
    for drafted, accepted in steps:
        if drafted:
            counts.take(drafted, accepted)
            metrics.observe(drafted, accepted, detailed=True)
    counts.cut(metrics, len(steps), sum(accepted + 1 for _, accepted in steps[:-1]) + num_kept)


@pytest.mark.parametrize(
    ("steps", "num_kept", "expected"),
    [
        # the end token is what the model draws after the draft
        pytest.param([(0, 0), (3, 2)], 3, (1, 3, (1, 1, 0)), id="whole"),
        pytest.param([(0, 0), (3, 3)], 4, (1, 3, (1, 1, 1)), id="whole draft and one more"),
        pytest.param([(0, 0), (3, 0)], 1, (1, 3, (0, 0, 0)), id="rejected"),
        # the end token is in the draft
        pytest.param([(0, 0), (3, 3)], 1, (1, 1, (1, 0, 0)), id="first drafted token"),
        pytest.param([(0, 0), (3, 3)], 2, (1, 2, (1, 1, 0)), id="second drafted token"),
        pytest.param([(0, 0), (3, 2)], 2, (1, 2, (1, 1, 0)), id="last accepted token"),
        pytest.param([(0, 0), (3, 1), (3, 3)], 1, (2, 4, (2, 0, 0)), id="after another draft"),
        # n-grams are not found in each step
        pytest.param([(0, 0), (2, 2), (0, 0)], 1, (1, 2, (1, 1, 0)), id="no draft at the end"),
        pytest.param([(0, 0)], 1, (0, 0, (0, 0, 0)), id="no draft"),
    ],
)
def test_drafted_tokens_are_counted_up_to_the_end_token(steps, num_kept, expected):
    counts = DraftCounts(3)
    request_of(counts, steps, num_kept=num_kept)
    assert counts.read() == expected


def test_completions_that_end_in_their_first_draft_have_a_rate_of_their_own_tokens():
    counts = DraftCounts(3)
    for _ in range(100):
        # accepted by the model in full, and discarded but for the first token
        request_of(counts, [(0, 0), (3, 3)], num_kept=1)
    _, num_drafted, accepted = counts.read()
    assert (num_drafted, accepted) == (100, (100, 0, 0))
