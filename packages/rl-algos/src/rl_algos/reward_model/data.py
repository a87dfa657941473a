"""Training rows of reward models."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.preference.comparison import Verdict
from rl_algos.preference.data import PreferenceData, preference_data, preference_reader
from rl_algos.reward_model.config import RewardModelConfig, RewardModelRoot


def prepare(config: RewardModelRoot, tokenizer: Any, datasets: Datasets) -> PreferenceData:
    """Pairs, or single responses with a score, whichever `rm.loss` learns from; called and raises as
    `rl_algos.preference.data.preference_data`."""
    by, needs_margin = _read(config.rm)
    return preference_data(config, config.rm, tokenizer, datasets, by=by, needs_margin=needs_margin)


def reader(config: RewardModelRoot) -> RowReader:
    """How a run reads its rows, to look at them."""
    by, needs_margin = _read(config.rm)
    return preference_reader(config, config.rm, by=by, needs_margin=needs_margin)


def _read(rm: RewardModelConfig) -> tuple[Verdict | None, bool]:
    """The verdict that `rm.loss` learns from, None for pairs, and whether pairs need a margin."""
    return "score" if rm.loss == "regression" else None, rm.margin != "ignore"
