"""Counts of speculative decoding and their metrics."""

from __future__ import annotations

import pytest

from rl_core.rollouts.speculation import SpeculationCounts


def counts(num_tokens: int, num_steps: int, *accepted: int, num_drafts: int = 0) -> SpeculationCounts:
    return SpeculationCounts(num_tokens, num_steps, num_drafts, 3 * num_drafts, accepted, 1.5)


def test_metrics_are_means_over_steps_and_drafts() -> None:
    found = counts(30, 20, 6, 3, 1, num_drafts=10).metrics()
    assert found == {
        "speculation/tokens_per_step": 1.5,
        "speculation/drafts_per_step": 0.5,
        "speculation/accepted_tokens": 1.0,
        "speculation/acceptance_rate": pytest.approx(1 / 3),
        "speculation/acceptance_rate_1": 0.6,
        "speculation/acceptance_rate_2": 0.3,
        "speculation/acceptance_rate_3": 0.1,
    }
    assert counts(0, 0).metrics() == {}
    # no token had an earlier occurrence
    assert set(counts(5, 5).metrics()) == {"speculation/tokens_per_step", "speculation/drafts_per_step"}


def test_counts_of_several_engines_add_up_and_a_replaced_engine_counts_from_its_start() -> None:
    first, second = counts(10, 8, 2, num_drafts=4), counts(30, 20, 6, 3, num_drafts=10)
    assert first + second == counts(40, 28, 8, 3, num_drafts=14)
    assert second.since(first) == counts(20, 12, 4, 3, num_drafts=6)
    assert first.since(second) == first


def test_speculation_pays_from_its_break_even() -> None:
    assert counts(15, 10).pays
    assert not counts(14, 10).pays
    assert counts(0, 0).pays


def test_health_holds_the_counts() -> None:
    for given in (counts(30, 20, 6, 3, 1, num_drafts=10), counts(5, 5)):
        health = {"num_sampled": 99, **given.as_health()}
        assert SpeculationCounts.of_health(health) == given
        assert health["num_accepted_tokens"] == sum(given.num_accepted)
    assert SpeculationCounts.of_health({"num_sampled": 99}) is None
