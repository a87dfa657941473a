"""Shared parts of algorithms that learn from given rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rl_algos.data.config import DataRoot
from rl_algos.data.examples import Datasets, load_examples
from rl_algos.data.inputs import input_problems
from rl_core import resolve
from rl_core.algorithm import Algorithm, AlgorithmEvaluation
from rl_core.config import Problem
from rl_core.plugins import RolloutNeeds
from rl_core.run import Components, Run

if TYPE_CHECKING:
    from rl_algos.supervised.data import SupervisedData

C = TypeVar("C", bound=DataRoot)
P = TypeVar("P", bound="SupervisedData[Any]")


_ROLLOUTS = "rl_algos.rollouts.algorithm"
"""Module for the tasks that a run scores, which only such a run imports. It is named here, because rollouts learn from
demonstrations with the code of SFT, and folders import one another in one direction."""


class SupervisedAlgorithm(Algorithm[C, Datasets, P]):
    """Reads the rows of a config, and the tasks that its run scores; a subclass adds `prepare` and `run`."""

    def input_problems(self, config: C) -> Iterator[Problem]:
        yield from input_problems(config)
        settings: Any = vars(config).get("eval")
        if settings is not None and settings.in_training:
            yield from resolve(f"{_ROLLOUTS}:task_input_problems")(settings, config.data)

    def load(self, config: C) -> Datasets:
        return load_examples(config)

    def check_data(self, prepared: P, state: Callable[[str], Mapping[str, Any]]) -> None:
        prepared.train.check(state("data"))

    def evaluation_problems(self, config: Any) -> Iterator[Problem]:
        found: Iterator[Problem] = resolve(f"{_ROLLOUTS}:evaluation_input_problems")(config)
        return found

    def evaluation(self, config: Any) -> AlgorithmEvaluation:
        found: AlgorithmEvaluation = resolve(f"{_ROLLOUTS}:RolloutEvaluation")(config)
        return found

    def rollouts(self, config: Any, prepared: P) -> RolloutNeeds:
        found: RolloutNeeds = resolve(f"{_ROLLOUTS}:evaluation_needs")(config, frozenset())
        return found

    def scores(self, config: Any, components: Components, run: Run) -> Callable[[int], None] | None:
        """Return the function that scores the tasks of a run after a step, if they are due; None without tasks."""
        if components.evaluation is None:
            return None
        found: Callable[[int], None] = resolve("rl_algos.rollouts.setup:task_scores")(config, components, run)
        return found
