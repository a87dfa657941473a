"""Settings of every algorithm that learns from preferences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rl_algos.data.config import DataConfig, DataRoot
from rl_algos.preference.comparison import Pairing
from rl_algos.supervised.config import SupervisedConfig
from rl_core.config import Problem
from rl_core.model_config import ModelConfig


class PreferenceConfig(SupervisedConfig):
    """Base of the section of an algorithm that learns from compared or judged responses."""

    pairing: Pairing = "best-worst"
    """Pairs to form from several ranked responses to a prompt: `best-worst` pairs the best with the worst, `all` forms
    every pair with a better response."""


class PreferenceRoot(DataRoot, Protocol):
    """The sections of a resolved config that every algorithm of preference learning reads."""

    policy: ModelConfig
    """The model that is trained."""


def preference_data_problems(key: str, data: DataConfig) -> Iterator[Problem]:
    """Yield settings of data that preference learning does not read.

    Args:
        key: Key of the algorithm's section.
        data: Config section `data`.
    """
    for section, dataset in data.sections():
        if dataset.output_key is not None:
            reason = f"is for datasets with one answer per row, but {key} learns from several responses"
            remedy = "List their columns in `columns`, such as {chosen: better, rejected: worse}"
            yield Problem(f"{section}.output_key", reason, got=dataset.output_key, remedy=remedy)
