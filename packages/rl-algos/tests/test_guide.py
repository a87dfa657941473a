"""The guides of algorithms name every part that a config can choose."""

from pathlib import Path
from typing import get_args

import pytest

from rl_algos.dpo.loss import LOSSES
from rl_algos.grpo.estimators import ESTIMATORS
from rl_algos.losses.importance import Truncation
from rl_algos.losses.surrogates import SURROGATES
from rl_algos.losses.terms import AggregationName

GUIDES = Path(__file__).parents[3] / "docs"
PARTS = {
    "grpo.adv_estimator": ("grpo.md", ESTIMATORS),
    "loss_fn.surrogate": ("grpo.md", SURROGATES),
    "loss_fn.aggregation": ("grpo.md", get_args(AggregationName)),
    "loss_fn.importance.truncation": ("grpo.md", get_args(Truncation)),
    "dpo.loss": ("algorithms.md", LOSSES),
}


@pytest.mark.parametrize("key", PARTS)
def test_every_choice_is_named(key):
    page, choices = PARTS[key]
    text = (GUIDES / page).read_text(encoding="utf-8")
    assert [name for name in choices if f"`{name}`" not in text] == []
