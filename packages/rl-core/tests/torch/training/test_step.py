"""A loss comes out the same however rows are spread over ranks and microbatches."""

import numpy as np
import pytest
from step_cases import Squares, num_planned, run_pass

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Batching
from rl_core.data.pipeline import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.errors import WorkerError
from rl_core.metrics import reduce_metrics

ROWS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]


def make_batch() -> Batch:
    tokens = Ragged.from_rows(ROWS)
    return Batch({"tokens": tokens, "targets": tokens.like(np.arange(len(tokens.values), dtype=np.float64))})


@pytest.mark.parametrize("shards", [[[0, 1, 2, 3]], [[2], [0, 1, 3]], [[0, 1, 2, 3], []]])
@pytest.mark.parametrize("max_tokens", [1, 5, 100])
def test_loss_gradient_and_metrics_do_not_depend_on_the_split(pool, shards, max_tokens):
    batch = make_batch()
    results = pool.run(run_pass, [(batch.select(rows), Squares(), max_tokens) for rows in shards])
    tokens = batch.ragged("tokens").values
    errors = 2.0 * tokens - np.arange(len(tokens))
    metrics = reduce_metrics([result[0] for result in results])
    assert metrics["loss"] == pytest.approx((errors**2).sum() / 10 + (errors**2).sum() / 4)
    assert metrics["squares"] == pytest.approx((errors**2).mean())
    assert metrics["num_tokens"] == 10
    gradient = (2 * errors * tokens).sum()
    assert sum(float(result[1]) for result in results) == pytest.approx(gradient / 10 + gradient / 4)
    assert len({result[2] for result in results}) == 1


def test_a_loss_that_depends_on_nothing_has_no_gradient(pool):
    ((metrics, gradient, _),) = pool.run(run_pass, [(make_batch(), Squares("detached"), 100)])
    assert gradient == 0
    assert metrics["loss"].result() > 0


@pytest.mark.parametrize(("row_multiple", "num_microbatches"), [(None, 7), (1, 2)])
def test_a_pipeline_gets_no_more_microbatches_than_must_be_padded(pool, row_multiple, num_microbatches):
    batch = Batch({"tokens": Ragged.from_rows([[1] * 200] * 20)})
    batching = Batching(packed=True, max_tokens=2048, max_rows=None, row_multiple=row_multiple)
    assert pool.run(num_planned, [(batch, batching, Pipeline(4))]) == [num_microbatches]


@pytest.mark.parametrize(
    ("metric", "message"),
    [("no denominator", "'squares' is a mean and needs a denominator"), ("unknown total", "over .'bananas'.")],
)
def test_a_wrong_implementation_is_named(pool, metric, message):
    with pytest.raises(WorkerError, match=message):
        pool.run(run_pass, [(make_batch(), Squares(metric), 100)])


def test_a_missing_column_is_named(pool):
    with pytest.raises(WorkerError, match="targets"):
        pool.run(run_pass, [(make_batch().only(["tokens"]), Squares(), 100)])
