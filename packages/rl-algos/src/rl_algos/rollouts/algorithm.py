"""What algorithms that train on their own rollouts have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rl_algos.data.examples import Datasets
from rl_algos.data.preview import RowReader
from rl_algos.rollouts import data, inputs
from rl_algos.rollouts.config import EvaluationRoot, RolloutRoot, rollout_config
from rl_algos.rollouts.data import RolloutData
from rl_algos.rollouts.evaluation import RolloutEvaluation
from rl_algos.rollouts.setup import needs
from rl_core.algorithm import Algorithm
from rl_core.config import Problem
from rl_core.environments.trial import Attempt
from rl_core.plugins import RolloutNeeds

C = TypeVar("C", bound=RolloutRoot)


class RolloutAlgorithm(Algorithm[C, Datasets, RolloutData]):
    """Loads prompts, rolls them out, and evaluates on them; a subclass adds `run`.

    `rl_algos.rollouts.setup.steps_of` gives `run` the steps of its loop.
    """

    def input_problems(self, config: C) -> Iterable[Problem]:
        return inputs.input_problems(config)

    def load(self, config: C) -> Datasets:
        return data.load(config)

    def attempts(self, config: C, loaded: Datasets) -> Mapping[str, Sequence[Attempt]]:
        return data.attempts(loaded, rollout_config(config).agent)

    def prepare(self, config: C, tokenizer: Any, loaded: Datasets) -> RolloutData:
        return data.prepare(config, tokenizer, loaded)

    def check_data(self, prepared: RolloutData, state: Callable[[str], Mapping[str, Any]]) -> None:
        prepared.train.check(state("rollouts")["prompts"])

    def rollouts(self, config: C, prepared: RolloutData) -> RolloutNeeds:
        return needs(config, prepared)

    def evaluation_problems(self, config: C) -> Iterable[Problem]:
        return inputs.evaluation_problems(config)

    def evaluation(self, config: C) -> RolloutEvaluation:
        return RolloutEvaluation(config, self.load)

    def row_reader(self, config: C) -> RowReader:
        return data.reader(config)


class EvaluationOnly(Algorithm[EvaluationRoot, None, None]):
    """Evaluates a model on tasks, without a run that trains it."""

    def input_problems(self, config: EvaluationRoot) -> Iterable[Problem]:
        return inputs.evaluation_problems(config)

    def evaluation_problems(self, config: EvaluationRoot) -> Iterable[Problem]:
        return inputs.evaluation_problems(config)

    def evaluation(self, config: EvaluationRoot) -> RolloutEvaluation:
        return RolloutEvaluation(config)
