"""A reward that is the weighted sum of several functions, each reported by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_core.environments.reward_log import merged_info
from rl_core.rollouts.environment import Conversation, Environment, SavingEnvironment, StepResult, UnusableAnswer
from rl_core.user_code import FromFile


@dataclass(frozen=True)
class RewardPart:
    """A function of a sum.

    Args:
        name: Under which it is reported.
        function: `"package.module:function"`, or a function in a file of the user's.
        weight: Weight in the sum.
    """

    name: str
    function: str | FromFile
    weight: float


@dataclass(frozen=True)
class RewardSum:
    """The functions of `env.<name>.rewards`, as they are sent to processes.

    Args:
        environment: Whose reward they are added to; None for none.
        parts: The functions.
    """

    environment: str | FromFile | None
    parts: tuple[RewardPart, ...]

    def __str__(self) -> str:
        return " + ".join([*([str(self.environment)] if self.environment else []), *(part.name for part in self.parts)])


class SummedRewards:
    """Adds functions to the reward of an environment when a rollout ends, or scores a response only by them. It saves
    states if the environment does.

    Args:
        environment: None to end every rollout with its first turn.
        parts: Name, scoring environment and weight of each.
    """

    def __init__(self, environment: Environment | None, parts: Sequence[tuple[str, Environment, float]]) -> None:
        self._environment = environment
        self._parts = tuple(parts)
        if isinstance(environment, SavingEnvironment):
            self.save, self.restore = environment.save, environment.restore

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        """Results of the environment; those that end have the functions' rewards too, except of functions that do not
        apply to the row."""
        if self._environment is None:
            results = [StepResult() for _ in conversations]
        else:
            results = list(self._environment.step(conversations, states))
        ended = [index for index, result in enumerate(results) if result.done]
        if not ended:
            return results
        scored = [conversations[index] for index in ended]
        for name, part, weight in self._parts:
            for index, score in zip(ended, part.step(scored, [None] * len(scored)), strict=True):
                results[index] = _with_part(results[index], name, score, weight)
        return results

    def close(self, states: Sequence[Any]) -> None:
        """Close the environment's states; functions have none."""
        if self._environment is not None:
            self._environment.close(states)


def _with_part(result: StepResult, name: str, score: StepResult, weight: float) -> StepResult:
    rewards, value = result.rewards(), score.rewards()["reward"]
    if name in rewards:
        raise UnusableAnswer(f"two rewards are called {name!r}; rename the one under `rewards`")
    info = merged_info(result.info, score.info)
    if score.reward == {}:
        return replace(result, info=info)
    return replace(result, reward={**rewards, name: value, "reward": rewards["reward"] + weight * value}, info=info)
