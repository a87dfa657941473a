import math

import pytest

from rl_core.errors import RLError
from rl_core.torch.training.skipped_steps import SkippedSteps


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


def test_without_skips_the_first_ends_the_run() -> None:
    with pytest.raises(RLError, match="max_skipped_steps=0"):
        SkippedSteps(0).admits(math.nan)
