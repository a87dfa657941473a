"""The implementation of an algorithm, as one class in its plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rl_core.environments.trial import Attempt
from rl_core.errors import ConfigError, Problem
from rl_core.plugins import AlgorithmPlugin, RolloutNeeds
from rl_core.run import Components, Run
from rl_core.tokenizer import Tokenizer
from rl_core.user_code import resolve

C = TypeVar("C")
"""The resolved config."""
L = TypeVar("L")
"""The data of the config, read but not tokenized."""
P = TypeVar("P")
"""The data that the loop trains on."""


class AlgorithmEvaluation(Protocol):
    """The evaluation of a config whose data has been read."""

    def attempts(self) -> Mapping[str, Sequence[Attempt]]:
        """Return first rows of the data with responses, by the name of the environment that scores them."""

    def plan(self, tokenizer: Tokenizer) -> Any:
        """Return the rollouts and their scoring (`rl_algos.rollouts.driver.task_evaluation.EvaluationPlan`).

        Raises:
            ConfigError, DataError: If the prompts cannot be tokenized, or none leaves room for a completion.
        """


class Algorithm(Generic[C, L, P]):
    """An algorithm in the driver's process, from the resolved config to the last step.

    Subclass it and name the class as `AlgorithmPlugin.implementation`. A command makes one object of it, without
    arguments. `rl train` calls, in this order: `input_problems`, `load`, `attempts`, `evaluation` (if the run evaluates
    as it trains), `prepare`, `rollouts` (if the algorithm generates) and, once all workers have started, `run`.

        class Focal(SFT):
            def run(self, config, components, run): ...

        PLUGIN = AlgorithmPlugin(name="focal", implementation="focal.py:Focal", ...)
    """

    def input_problems(self, config: C) -> Iterable[Problem]:
        """Yield what is wrong with the files, folders and names that the training data comes from, without reading
        rows, so that all of it is reported together. `rl doctor` calls it too."""
        return ()

    def load(self, config: C) -> L:
        """Read the data, and check what can be checked without a tokenizer, which takes seconds to load.

        Raises:
            ConfigError, DataError: Naming the dataset, the row and the remedy.
        """
        raise NotImplementedError(f"{type(self).__name__} trains, so it must define load")

    def attempts(self, config: C, loaded: L) -> Mapping[str, Sequence[Attempt]]:
        """Return first rows of the data with responses, by the name of their environment, which is tried on them before
        anything starts."""
        return {}

    def prepare(self, config: C, tokenizer: Tokenizer, loaded: L) -> P:
        """Tokenize the data and check the result, before anything starts. It becomes `Components.data`.

        Raises:
            ConfigError, DataError: Naming the dataset, the row and the remedy.
        """
        raise NotImplementedError(f"{type(self).__name__} trains, so it must define prepare")

    def check_data(self, prepared: P, state: Callable[[str], Mapping[str, Any]]) -> None:
        """Compare the data with the position in them that a checkpoint holds, before anything starts. An algorithm that
        does not define it finds out when it restores the checkpoint.

        Args:
            prepared: The data.
            state: Function from a name to what the `Checkpointable` of that name saved.

        Raises:
            DataChanged: If they are other data.
        """

    def rollouts(self, config: C, prepared: P) -> RolloutNeeds:
        """Return what the rollouts of a run need; called only if the algorithm generates."""
        raise NotImplementedError(f"{type(self).__name__} generates, so it must define rollouts")

    def run(self, config: C, components: Components, run: Run) -> None:
        """Train, from the first step that is missing to the last."""
        raise NotImplementedError(f"{type(self).__name__} trains, so it must define run")

    def evaluation_problems(self, config: C) -> Iterable[Problem]:
        """Yield what is wrong with the files and names that the data of an evaluation comes from."""
        return ()

    def evaluation(self, config: C) -> AlgorithmEvaluation:
        """Read the data of an evaluation; called only if `AlgorithmPlugin.evaluates`.

        Raises:
            ConfigError, DataError: If there is nothing to evaluate on, or it cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} evaluates, so it must define evaluation")

    def row_reader(self, config: C) -> Any:
        """Return the `rl_algos.data.preview.RowReader` that reads single rows for `rl data show` as `load` and
        `prepare` do. Rows of an algorithm that does not define it cannot be shown."""
        raise NotImplementedError(f"{type(self).__name__} must define row_reader to have its rows shown")


def implementation_of(algorithm: AlgorithmPlugin) -> Algorithm[Any, Any, Any]:
    """Import and make the implementation of an algorithm's plugin.

    Raises:
        ConfigError: If there is no such class, or it is not an `Algorithm`.
    """
    try:
        found = resolve(algorithm.implementation)
    except ValueError as error:
        raise ConfigError(f"algorithm: implementation of {algorithm.name}: {error}") from None
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        raise ConfigError(
            f"algorithm: implementation of {algorithm.name}: {algorithm.implementation} must be a subclass of "
            "rl_core.Algorithm"
        )
    made: Algorithm[Any, Any, Any] = found()
    return made
