"""Training rows of reward models."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.preference.comparison import Verdict
from rl_algos.preference.data import PreferenceData, preference_data
from rl_algos.reward_model.config import RewardModelRoot


def prepare(config: RewardModelRoot, tokenizer: Any, datasets: Datasets) -> PreferenceData:
    """Pairs, or single responses with a score, whichever `rm.loss` learns from; called and raises as
    `rl_algos.preference.data.preference_data`."""
    rm = config.rm
    by: Verdict | None = "score" if rm.loss == "regression" else None
    return preference_data(config, rm, tokenizer, datasets, by=by, needs_margin=rm.margin != "ignore")
