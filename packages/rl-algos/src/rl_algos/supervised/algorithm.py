"""Shared parts of algorithms that learn from given rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rl_algos.data.config import DataRoot
from rl_algos.data.examples import Datasets, load_examples
from rl_algos.data.inputs import input_problems
from rl_core.algorithm import Algorithm

if TYPE_CHECKING:
    from rl_algos.supervised.data import SupervisedData

C = TypeVar("C", bound=DataRoot)
P = TypeVar("P", bound="SupervisedData[Any]")


class SupervisedAlgorithm(Algorithm[C, Datasets, P]):
    """Reads the rows of a config; a subclass adds `prepare` and `run`."""

    input_problems = staticmethod(input_problems)

    def load(self, config: C) -> Datasets:
        return load_examples(config)

    def check_data(self, prepared: P, state: Callable[[str], Mapping[str, Any]]) -> None:
        prepared.train.check(state("data"))
