"""Differences of logprobs that the canary accepts, warns of and refuses."""

import logging

import numpy as np
import pytest

from rl_core.data.ragged import Ragged
from rl_core.errors import FailureOrigin, WeightSyncError
from rl_launch.runtime.weight_sync import MAX_LENGTH, MAX_ROWS, Canary

ENGINES = [FailureOrigin("rollout worker", index, "here", "canary") for index in range(2)]
PROMPTS = [tuple(range(40)), tuple(range(100)), (1,), (2, 3), (4,) * 10]
DENSE, MIXTURE, STALE_LAYER = 0.014, 0.25, 1.5
"""Mean differences in bfloat16: of a dense model, of a mixture of experts whose routers round differently, and of an
engine that serves one layer of another version."""


def canary(**settings):
    return Canary.of(50, **{"precision": "bfloat16", "prompts": PROMPTS, **settings})


def check(found, version, *differences, **settings):
    """Compare with engines whose logprobs are off by these means, with a spread."""
    rng = np.random.default_rng(version)
    expected = Ragged.from_rows([-1.5 + np.arange(len(row), dtype=np.float32) % 2 for row in found.rows])
    scores = []
    for difference in differences:
        noise = [rng.exponential(size=len(row)).astype(np.float32) for row in expected]
        scores.append([row + difference * each / each.mean() for row, each in zip(expected, noise, strict=True)])
    found.check(version, expected, ENGINES[: len(scores)], scores, **settings)


def test_rows_are_the_beginnings_of_the_first_prompts():
    rows = list(canary().rows)
    assert [len(row) for row in rows] == [40, MAX_LENGTH, 1, 2]
    assert len(rows) == MAX_ROWS
    assert all(row.tolist() == list(prompt)[:MAX_LENGTH] for row, prompt in zip(rows, PROMPTS, strict=False))
    assert canary().rows.values.dtype == np.int32


def test_rows_have_no_tokens_of_images():
    rows = list(canary(image_token=7, prompts=[(7,) * 30, (1, 7, 7, *range(10, 40))]).rows)
    assert [row.tolist() for row in rows] == [[1, *range(10, 40)]]
    drawn = canary(image_token=7, prompts=()).rows
    assert len(drawn)
    assert not (drawn.values == 7).any()


@pytest.mark.parametrize("prompts", [(), [(1, 2, 3)]], ids=["none", "too short"])
def test_rows_are_random_without_prompts(prompts):
    rows = list(canary(prompts=prompts).rows)
    assert [len(row) for row in rows] == [24, 24]
    assert all(len(set(row.tolist())) > 12 and row.max() < 50 for row in rows)


def test_the_tolerance_is_that_of_the_precision_unless_it_is_set():
    assert canary(precision="float32").tolerance == 1e-3
    assert canary().tolerance == 0.1
    assert canary(tolerance=0.3).tolerance == 0.3
    assert canary(tolerance=0.0).tolerance == 0.0
    with pytest.raises(WeightSyncError, match="more than 0 "):
        check(canary(tolerance=0.0), 1, 1e-6)


@pytest.mark.parametrize("noise", [DENSE, MIXTURE])
def test_noise_that_the_first_version_shows_too_passes_and_a_stale_layer_does_not(noise):
    found = canary()
    for version in range(1, 5):
        check(found, version, noise, noise * (1 + 0.3 * version))
    with pytest.raises(WeightSyncError, match=r"rollout worker rank 1.*version 5 differ"):
        check(found, 5, noise, STALE_LAYER)
    check(found, 6, noise, noise)


def test_a_first_version_whose_engine_lacks_a_layer_is_refused_and_is_not_what_others_are_judged_by():
    found = canary()
    with pytest.raises(WeightSyncError, match=r"more than 1 \(10 times policy.generation.canary_tolerance\)"):
        check(found, 1, STALE_LAYER)
    check(found, 1, DENSE)
    with pytest.raises(WeightSyncError, match=r"more than 0.1 "):
        check(found, 2, MIXTURE)


def test_a_dense_model_may_not_become_as_far_off_as_a_mixture():
    found = canary()
    check(found, 1, DENSE)
    with pytest.raises(WeightSyncError):
        check(found, 2, MIXTURE)


def test_no_first_version_lets_a_stale_layer_pass():
    found = canary()
    check(found, 1, 0.9)
    assert found.limit == pytest.approx(1.0)
    with pytest.raises(WeightSyncError):
        check(found, 2, STALE_LAYER)


def test_differences_above_the_tolerance_are_logged_as_they_grow(caplog):
    caplog.set_level(logging.WARNING)
    found = canary()
    logged = []
    for version, difference in enumerate((MIXTURE, MIXTURE / 2, MIXTURE, 2 * MIXTURE, DENSE), 1):
        check(found, version, difference)
        logged.append(len(caplog.records))
    assert logged == [1, 1, 1, 2, 2]
    assert "differ from the policy's by 0.25 on average" in caplog.text


def test_a_difference_that_is_not_a_number_is_refused():
    with pytest.raises(WeightSyncError, match="nan"):
        check(canary(), 1, float("nan"))


def test_a_resumed_run_judges_by_the_first_version_of_the_run():
    found, resumed = canary(), canary()
    check(found, 1, MIXTURE)
    resumed.restore(found.state())
    check(resumed, 7, 2 * MIXTURE)
    with pytest.raises(WeightSyncError, match=r"the first version differed by 0\.25"):
        check(resumed, 8, 4 * MIXTURE)


def test_the_measured_error_of_quantised_weights_is_added_to_what_is_accepted():
    """Logprobs have a standard deviation of about 0.5."""
    found = canary()
    check(found, 1, 0.12, quantisation_noise=0.2)
    check(found, 2, 0.19, quantisation_noise=0.2)
    with pytest.raises(WeightSyncError, match=r"more than 0\.2 .*, and 0\.1 for the measured error of"):
        check(found, 3, 0.21, quantisation_noise=0.2)
    with pytest.raises(WeightSyncError, match=r"more than 0\.1 "):
        check(found, 3, 0.19)
