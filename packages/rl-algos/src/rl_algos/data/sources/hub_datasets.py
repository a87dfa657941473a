"""Datasets of the hub whose columns are known, so that their name is enough.

Names, subsets, splits and columns follow their cards. They are in `hub_datasets.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from rl_algos.data.config import DatasetConfig, Purpose


@dataclass(frozen=True)
class HubDataset:
    """Settings of a dataset, for those that the user does not give.

    Args:
        doc: One line.
        processor: Processor of its rows; None for rows that have `messages`.
        columns: See `DatasetConfig.columns`.
        subset: Configuration that is read.
        splits: Splits by purpose; the purpose itself if there is none for it.
        environment: Scores completions; empty if none of the installed ones can.
    """

    doc: str
    processor: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    subset: str | None = None
    splits: Mapping[Purpose, str] = field(default_factory=dict)
    environment: str = ""


_TABLES = json.loads(files(__package__).joinpath("hub_datasets.json").read_text(encoding="utf-8"))

DATASETS: Mapping[str, HubDataset] = {name: HubDataset(**known) for name, known in _TABLES["datasets"].items()}
"""By the name on the hub, for algorithms that learn from answers and conversations."""

PREFERENCES: Mapping[str, HubDataset] = {name: HubDataset(**known) for name, known in _TABLES["preferences"].items()}
"""By the name on the hub, for algorithms that learn from preferences."""


def with_known(settings: DatasetConfig, purpose: Purpose, *, of_preferences: bool) -> DatasetConfig:
    """Return the settings of a dataset with known values for keys that the user has not set. With `input_key`, the rows
    are read without a processor.

    Args:
        settings: Settings of the dataset as the user wrote them.
        purpose: Purpose of the dataset, which selects the known split.
        of_preferences: True if the algorithm learns from preferences.
    """
    known = (PREFERENCES if of_preferences else DATASETS).get(settings.dataset_name or "")
    if known is None:
        return settings
    values = {
        "processor": None if {"input_key", "output_key"} & settings.model_fields_set else known.processor,
        "columns": dict(known.columns),
        "subset": known.subset,
        "split": known.splits.get(purpose),
        "env_name": known.environment or None,
    }
    if "processor" in settings.model_fields_set or values["processor"] is None:
        del values["columns"]
    unset = {key: value for key, value in values.items() if key not in settings.model_fields_set}
    return settings.model_copy(update=unset)
