"""A loss comes out the same however rows are spread over ranks and microbatches."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from step_cases import Squares, num_planned, run_pass

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Batching, Pipeline
from rl_core.data.ragged import Ragged
from rl_core.errors import RLError, WorkerError
from rl_core.metrics import reduce_metrics
from rl_core.torch.training.step import LossScale, SkippedSteps, prepared_ahead

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


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams in name only; what happens on them, in order."""
    events = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def record_event(self):
            events.append("recorded")
            return len(events)

        def wait_event(self, event):
            events.append(f"waits for {event}")

    @contextmanager
    def within(stream):
        events.append("copies")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return events


def test_one_microbatch_is_made_ahead_and_none_twice(streams):
    made = []

    def maker(index):
        def make():
            made.append(index)
            offsets = SimpleNamespace(index=index, record_stream=lambda stream: streams.append("kept"))
            return SimpleNamespace(rows=SimpleNamespace(offsets=offsets, columns={}))

        return make

    taken = prepared_ahead([maker(index) for index in range(3)], torch.device("cuda"))
    for index, ahead in enumerate([[0, 1], [0, 1, 2], [0, 1, 2]]):
        assert taken[index]().rows.offsets.index == index
        assert made == ahead
    assert streams[:6] == ["copies", "recorded", "copies", "recorded", "waits for 2", "kept"]


def test_a_device_without_streams_makes_each_in_its_turn():
    makers = [lambda: None]
    assert prepared_ahead(makers, torch.device("cpu")) is makers


def test_a_finite_gradient_is_admitted_however_large() -> None:
    skipped = SkippedSteps(0)
    assert all(skipped.admits(norm) for norm in (0.0, 1.0, 1e38))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_as_many_steps_in_a_row_are_skipped_as_the_limit_says(norm: float) -> None:
    skipped = SkippedSteps(2)
    assert [skipped.admits(norm), skipped.admits(norm)] == [False, False]
    with pytest.raises(RLError, match="3 training steps in a row"):
        skipped.admits(norm)


def test_a_finite_gradient_starts_the_count_again() -> None:
    skipped = SkippedSteps(1)
    assert [skipped.admits(norm) for norm in (math.nan, 1.0, math.nan, 2.0)] == [False, True, False, True]


def test_a_norm_above_the_bound_is_skipped_and_counted_as_one_that_is_not_finite() -> None:
    skipped = SkippedSteps(2, above=5.0)
    assert [skipped.admits(norm) for norm in (5.0, 5.1, math.nan, 4.9)] == [True, False, False, True]


def test_without_skips_the_first_ends_the_run() -> None:
    with pytest.raises(RLError, match="max_skipped_steps=0"):
        SkippedSteps(0).admits(math.nan)


def test_the_scale_of_the_loss_follows_overflows_as_in_torch():
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    theirs.scale(torch.ones(1))  # It makes its factor when it is first used.
    theirs.set_growth_interval(3)
    ours.GROWTH_INTERVAL = 3
    for is_finite in (True, False, True, True, True, True, False, False, True, True, True):
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([1.0 if is_finite else float("inf")])
        theirs.step(optimizer)
        theirs.update()
        assert ours.overflows(1.0 if is_finite else float("nan")) != is_finite
        assert ours.value == theirs.get_scale()
    resumed = LossScale()
    resumed.restore(ours.state())
    assert resumed.state() == ours.state()


def test_a_gradient_that_is_not_finite_without_scale_is_no_overflow():
    scale = LossScale()
    scale.value = 1.0
    assert not scale.overflows(float("inf"))
    assert scale.value == 1.0
