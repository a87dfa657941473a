"""Static checks of preference data."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.data.config import DataConfig
from rl_core.config import Problem


def preference_data_problems(key: str, data: DataConfig) -> Iterator[Problem]:
    """Settings of data that preference learning does not read.

    Args:
        key: Key of the algorithm's section.
        data: Config section `data`.
    """
    for section, dataset in data.sections():
        if dataset.output_key is not None:
            yield Problem(
                f"{section}.output_key",
                f"is for datasets with one answer per row, but {key} learns from several responses",
                got=dataset.output_key,
                remedy="List their columns in `columns`, such as {chosen: better, rejected: worse}",
            )
