"""What algorithms that learn from comparisons have in common."""

from __future__ import annotations

from typing import Any, TypeVar

from rl_algos.data.examples import Datasets
from rl_algos.preference.config import PreferenceRoot
from rl_algos.supervised.algorithm import SupervisedAlgorithm

C = TypeVar("C", bound=PreferenceRoot)


class PreferenceAlgorithm(SupervisedAlgorithm[C, Any]):
    """Reads pairs of responses, or single ones with a verdict; a subclass adds `prepare` and `run`."""

    def load(self, config: C) -> Datasets:
        # imports transformers, which takes a second that checks before need not pay
        from rl_algos.preference.data import load

        return load(config)
