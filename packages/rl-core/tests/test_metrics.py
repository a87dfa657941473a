from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.metrics import Metric, combine, over_updates, reduce_metrics, results

# multiples of a power of two add without rounding, so that order cannot matter
exact = st.integers(-(2**20), 2**20).map(lambda n: n / 8)
parts = st.lists(st.tuples(exact, st.integers(0, 100)), min_size=1, max_size=10)


@given(parts, st.randoms(use_true_random=False), st.sampled_from(["mean", "sum", "max", "min"]))
def test_parts_combine_in_any_order_and_grouping(
    values: list[tuple[float, int]], random: object, reduction: str
) -> None:
    metrics = [Metric(value, weight, reduction) for value, weight in values]
    expected = reduce_metrics({"m": metric} for metric in metrics)["m"]
    random.shuffle(metrics)
    while len(metrics) > 1:
        metrics.append(metrics.pop(random.randrange(len(metrics))) + metrics.pop())
    assert metrics[0].result() == expected


@given(parts)
def test_each_reduction_is_what_its_name_says(values: list[tuple[float, int]]) -> None:
    numbers, weights = [v for v, _ in values], [w for _, w in values]
    expected = {
        "sum": sum(numbers),
        "max": max(numbers),
        "min": min(numbers),
        "mean": sum(numbers) / sum(weights) if sum(weights) else 0.0,
    }
    got = reduce_metrics({name: Metric(v, w, name) for name in expected} for v, w in values)
    assert got == expected


@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("order", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_comes_through(reduction: str, order: tuple[float, float]) -> None:
    assert math.isnan(reduce_metrics([{"m": Metric(value, 1.0, reduction)} for value in order])["m"])


def test_a_metric_that_only_some_ranks_report_is_reduced_over_those() -> None:
    assert reduce_metrics([{"a": Metric(4.0, 2.0)}, {"b": Metric(1.0, 0.0)}, {"a": Metric(2.0, 1.0)}]) == {
        "a": 2.0,
        "b": 0.0,
    }


def test_reductions_do_not_mix() -> None:
    with pytest.raises(ValueError, match="both mean and max"):
        Metric(1.0) + Metric(1.0, 1.0, "max")


def test_each_update_of_a_step_counts_alike_however_many_tokens_it_has():
    updates = [
        combine([{"ratio": Metric(3.0, 2.0), "loss": Metric(value, reduction="sum", over_updates="mean")}])
        for value in (1.0, 3.0, 4.0)
    ]
    updates[1]["ratio"] = Metric(90.0, 30.0)
    assert results(over_updates(updates)) == {"ratio": (1.5 + 3.0 + 1.5) / 3, "loss": 8.0 / 3}


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (lambda value: Metric(value, reduction="sum"), 6.0),
        (lambda value: Metric(value, reduction="max"), 3.0),
        (lambda value: Metric(value, reduction="min"), 1.0),
        (lambda value: Metric(value, reduction="max", over_updates="last"), 2.0),
        (lambda value: Metric(value, reduction="max", over_updates="sum"), 6.0),
        (lambda value: Metric(value, reduction="max", over_updates="mean"), 2.0),
    ],
)
def test_a_metric_says_how_updates_of_it_combine(metric, expected):
    updates = [{"m": metric(value)} for value in (1.0, 3.0, 2.0)]
    assert results(over_updates(updates)) == {"m": expected}


def test_recorded_numbers_and_metrics_may_be_mixed():
    assert results({"a": 1.5, "b": Metric(4.0, 2.0)}) == {"a": 1.5, "b": 2.0}
