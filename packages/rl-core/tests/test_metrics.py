from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.metrics import Metric, reduce_metrics

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
