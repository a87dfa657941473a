"""Shared parts of algorithms that learn from given rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rl_algos.data.config import DataRoot
from rl_algos.data.examples import Datasets, load_examples
from rl_algos.data.inputs import input_problems
from rl_core.algorithm import Algorithm, AlgorithmEvaluation
from rl_core.config import Problem
from rl_core.plugins import RolloutNeeds
from rl_core.run import Components, Run

if TYPE_CHECKING:
    from rl_algos.supervised.data import SupervisedData

C = TypeVar("C", bound=DataRoot)
P = TypeVar("P", bound="SupervisedData[Any]")


class SupervisedAlgorithm(Algorithm[C, Datasets, P]):
    """Reads the rows of a config, and the tasks that its run scores; a subclass adds `prepare` and `run`."""

    def input_problems(self, config: C) -> Iterator[Problem]:
        yield from input_problems(config)
        settings: Any = vars(config).get("eval")
        if settings is not None and settings.in_training:
            from rl_algos.rollouts.algorithm import task_input_problems

            yield from task_input_problems(settings, config.data)

    def load(self, config: C) -> Datasets:
        return load_examples(config)

    def check_data(self, prepared: P, state: Callable[[str], Mapping[str, Any]]) -> None:
        prepared.train.check(state("data"))

    # Only runs that score tasks need the modules below.

    def evaluation_problems(self, config: Any) -> Iterator[Problem]:
        from rl_algos.rollouts.algorithm import evaluation_input_problems

        return evaluation_input_problems(config)

    def evaluation(self, config: Any) -> AlgorithmEvaluation:
        from rl_algos.rollouts.algorithm import RolloutEvaluation

        return RolloutEvaluation(config)

    def rollouts(self, config: Any, prepared: P) -> RolloutNeeds:
        from rl_algos.judges.needs import with_judges
        from rl_algos.rollouts.algorithm import evaluation_needs

        return with_judges(evaluation_needs(config, frozenset()), config)

    def scores(self, config: Any, components: Components, run: Run) -> Callable[[int], None] | None:
        """Return the function that scores the tasks of a run after a step, if they are due; None without tasks."""
        if components.evaluation is None:
            return None
        from rl_algos.rollouts.setup import task_scores

        return task_scores(config, components, run)
