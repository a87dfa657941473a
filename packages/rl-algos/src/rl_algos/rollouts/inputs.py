"""Files and names that a run with rollouts reads, checked together before any row is read."""

from __future__ import annotations

from collections.abc import Iterator

from rl_algos.data.config import DataConfig
from rl_algos.data.inputs import dataset_problems
from rl_algos.data.inputs import input_problems as of_data
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.evaluation.tasks import task_of
from rl_algos.rollouts.config import EvaluationRoot, RolloutRoot
from rl_core.config import Problem
from rl_core.errors import ConfigError


def input_problems(config: RolloutRoot) -> Iterator[Problem]:
    """Yield what is wrong with the files and names of a run's data, and of the tasks that it scores as it trains."""
    yield from of_data(config)
    if config.eval.in_training:
        yield from task_problems(config.eval, config.data)


def evaluation_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Yield what is wrong with the files and names of the data of an evaluation: of its tasks, or if it has none, of
    the validation data of its run."""
    data: DataConfig | None = getattr(config, "data", None)
    yield from task_problems(config.eval, data)
    if config.eval.tasks or data is None:
        return
    for key, section in data.sections():
        if not key.startswith("data.train"):
            yield from dataset_problems(key, section)


def task_problems(settings: EvaluationConfig, data: DataConfig | None) -> Iterator[Problem]:
    """Yield what is wrong with the names of all tasks, and with the files and folders of their data.

    Args:
        settings: Config section `eval`.
        data: Data of the run; None without one.
    """
    for place, given in enumerate(settings.tasks):
        key = f"eval.tasks[{place}]"
        try:
            task = task_of(given, settings, data)
        except ConfigError as error:
            yield Problem(key, str(error).removeprefix("eval.tasks: "))
        else:
            problems = dataset_problems(f"{key}.dataset", task.dataset)
            yield from problems if task is given else (problem.at(key) for problem in problems)
