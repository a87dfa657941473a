"""The rows that GRPO trains and validates on, before they are tokenised."""

from __future__ import annotations

from typing import Any

from rl_algos.data.examples import Datasets
from rl_algos.data.examples import load as load_all
from rl_core.config import did_you_mean
from rl_core.errors import DataError
from rl_core.plugins import ENVIRONMENTS, names


def load(config: Any) -> Datasets:
    """All data of the config, every row with an environment that scores it.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: where a file or a processor that a dataset names is not there.
    """
    datasets = load_all(config)
    known = names(ENVIRONMENTS)
    for dataset in (*datasets.train, *datasets.validation):
        for row_id in dataset.examples:
            name = dataset.environment(row_id)
            if name not in known:
                raise DataError(
                    f"row {row_id} names the environment {name!r}, which is not installed{did_you_mean(name, known)}; "
                    f"installed are {', '.join(known) or 'none'}"
                )
    return datasets
