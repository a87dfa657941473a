"""Training rows of preference optimisation."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.dpo.config import DPORoot
from rl_algos.dpo.loss import learns_from_responses, loss_of
from rl_algos.preference.comparison import Verdict
from rl_algos.preference.data import PreferenceData, preference_data


def prepare(config: DPORoot, tokenizer: Any, datasets: Datasets) -> PreferenceData:
    """Pairs, or single responses with a label, whichever the loss learns from; called and raises as
    `rl_algos.preference.data.preference_data`."""
    loss = loss_of(config.dpo)
    by: Verdict | None = "label" if learns_from_responses(loss) else None
    return preference_data(config, config.dpo, tokenizer, datasets, by=by, needs_margin="margin" in loss.columns)
