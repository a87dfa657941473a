"""The guide of algorithms names every part that a config can choose."""

from pathlib import Path
from typing import get_args

import pytest

from rl_algos.dpo.loss import LOSSES
from rl_algos.grpo.estimators import ESTIMATORS
from rl_algos.losses.aggregation import AggregationName
from rl_algos.losses.importance import Truncation
from rl_algos.losses.surrogates import SURROGATES

GUIDE = Path(__file__).parents[3] / "docs" / "algorithms.md"
PARTS = {
    "grpo.adv_estimator": ESTIMATORS,
    "loss_fn.surrogate": SURROGATES,
    "loss_fn.aggregation": get_args(AggregationName),
    "loss_fn.importance.truncation": get_args(Truncation),
    "dpo.loss": LOSSES,
}


@pytest.mark.parametrize("key", PARTS)
def test_every_choice_is_named(key):
    text = GUIDE.read_text(encoding="utf-8")
    assert [name for name in PARTS[key] if f"`{name}`" not in text] == []
