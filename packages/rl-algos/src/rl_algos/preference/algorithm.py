"""What algorithms that learn from comparisons have in common."""

from __future__ import annotations

from typing import TypeVar

from rl_algos.data.examples import Datasets
from rl_algos.preference.config import PreferenceRoot
from rl_algos.preference.data import PreferenceData, load
from rl_algos.supervised.algorithm import SupervisedAlgorithm

C = TypeVar("C", bound=PreferenceRoot)


class PreferenceAlgorithm(SupervisedAlgorithm[C, PreferenceData]):
    """Reads pairs of responses, or single ones with a verdict; a subclass adds `prepare` and `run`."""

    def load(self, config: C) -> Datasets:
        return load(config)
