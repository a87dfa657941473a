"""Training rows of preference optimisation."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.dpo.config import DPORoot
from rl_algos.dpo.loss import learns_from_responses, loss_of
from rl_algos.preference.comparison import Verdict
from rl_algos.preference.data import PreferenceData, preference_data, preference_reader
from rl_core.model import Loss


def prepare(config: DPORoot, tokenizer: Any, datasets: Datasets) -> PreferenceData:
    """Pairs, or single responses with a label, whichever the loss learns from; called and raises as
    `rl_algos.preference.data.preference_data`."""
    by, needs_margin = _read(loss_of(config.dpo))
    return preference_data(config, config.dpo, tokenizer, datasets, by=by, needs_margin=needs_margin)


def reader(config: DPORoot) -> RowReader:
    """How a run reads its rows, to look at them."""
    by, needs_margin = _read(loss_of(config.dpo))
    return preference_reader(config, config.dpo, by=by, needs_margin=needs_margin)


def _read(loss: Loss) -> tuple[Verdict | None, bool]:
    """The verdict that a loss learns from, None for pairs, and whether pairs need a margin."""
    return "label" if learns_from_responses(loss) else None, "margin" in loss.columns
