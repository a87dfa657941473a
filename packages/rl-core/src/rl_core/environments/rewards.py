"""Rewards: several as a weighted sum, functions that go with others (`rl_core:thinking_format`), and their log."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from rl_core.rollouts.environment import (
    Conversation,
    Environment,
    EnvironmentFailure,
    SavingEnvironment,
    StepResult,
    UnusableAnswer,
)
from rl_core.rollouts.thoughts import THOUGHTS, only_thoughts
from rl_core.user_code import FromFile

LOG_PARAMETERS = ("log_metric", "log_extra")
"""Parameters of reward functions that log; each is a method of `RewardLog`."""

EXTRA = "extra"
"""Entry of a rollout's `info` with the values of `log_extra`, by column."""
VERDICTS = "verdicts"
"""Entry of `info` with the verdicts that a function was given, until they are recorded with the rollout."""

_RECORDED = (type(None), bool, int, float, str, list, tuple, dict, np.generic, np.ndarray)


class RewardPart(NamedTuple):
    """A function of a sum.

    Args:
        name: Name under which it is reported.
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
        environment: Environment whose reward they are added to; None for none.
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

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> list[StepResult | EnvironmentFailure]:
        """Return the results of the environment; those that end have the functions' rewards too, except of functions
        that do not apply to the row."""
        results: list[StepResult | EnvironmentFailure]
        if self._environment is None:
            results = [StepResult() for _ in conversations]
        else:
            results = list(self._environment.step(conversations, states))
        for name, part, weight in self._parts:
            ended = [index for index, each in enumerate(results) if isinstance(each, StepResult) and each.done]
            scored = [conversations[index] for index in ended]
            for index, score in zip(ended, part.step(scored, [None] * len(scored)) if scored else (), strict=True):
                result = results[index]
                if isinstance(score, EnvironmentFailure):
                    results[index] = score
                    continue
                assert isinstance(result, StepResult)
                rewards, value = result.rewards(), score.rewards()["reward"]
                if name in rewards:
                    raise UnusableAnswer(f"two rewards are called {name!r}; rename the one under `rewards`")
                # An empty score does not apply to the row.
                if score.reward != {}:
                    total = rewards["reward"] + weight * value
                    result = replace(result, reward={**rewards, name: value, "reward": total})
                results[index] = replace(result, info=merged_info(result.info, score.info))
        return results

    def close(self, states: Sequence[Any]) -> None:
        """Close the environment's states; functions have none."""
        if self._environment is not None:
            self._environment.close(states)


class RewardLog:
    """The log of one call of a reward function.

    Args:
        function: Name of the function, for messages.
        num_responses: Number of responses that the call scores.
    """

    def __init__(self, function: str, num_responses: int) -> None:
        self._function = function
        self._num_responses = num_responses
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """Record a number, which is averaged over the rollouts of a step: the metric `environment/<name>`. Several
        values under one name in a call are averaged.

        Raises:
            UnusableAnswer: If the value is not a number.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UnusableAnswer(
                f"{self._function} called log_metric({name!r}, {value!r:.80}); give a number, or use log_extra"
            ) from None
        self._metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Any) -> None:
        """Keep a value for each response in the record of its rollout, in `info`, `extra`; an object of another type
        than numbers, strings, lists and dicts is kept as its string.

        Raises:
            UnusableAnswer: If there are not as many values as responses.
        """
        listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str | Mapping) else []
        if len(listed) != self._num_responses:
            raise UnusableAnswer(
                f"{self._function} called log_extra({column!r}, {values!r:.80}); give a list with a value for each of "
                f"the {self._num_responses} responses"
            )
        self._columns[str(column)] = [value if isinstance(value, _RECORDED) else str(value) for value in listed]

    def infos(self) -> list[Mapping[str, Any]]:
        """Return the `info` of each response; empty if nothing was recorded."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        infos: list[Mapping[str, Any]] = []
        for index in range(self._num_responses):
            extra = {column: values[index] for column, values in self._columns.items()}
            infos.append({**means, EXTRA: extra} if extra else means)
        return infos


def merged_info(info: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Join the `info` of two rewards of one turn; columns of `log_extra` and verdicts of both stay."""
    extras = [each[EXTRA] for each in (info, other) if isinstance(each.get(EXTRA), Mapping)]
    verdicts = [each[VERDICTS] for each in (info, other) if isinstance(each.get(VERDICTS), list)]
    joined = {**info, **other}
    if len(verdicts) == 2:
        joined[VERDICTS] = [*verdicts[0], *verdicts[1]]
    return joined if len(extras) < 2 else {**joined, EXTRA: {**extras[0], **extras[1]}}


def thinking_format(response: str, opened_thoughts: str = "") -> float:
    """Return 1 if the response is one `<think>...</think>` and an answer after it, else 0; the prompt may have opened
    it."""
    found = only_thoughts(response, opened_thoughts)
    begins = (opened_thoughts + response).lstrip().startswith(tuple(THOUGHTS))
    return float(found is not None and begins and bool(found[0]) and bool(found[1].strip()))


def length_penalty(response: str, max_characters: int = 4000) -> float:
    """Return 0 up to a number of characters, which a row may set; beyond it a value that decreases linearly to -1 at
    twice as many."""
    over = len(response) - max_characters
    return -min(max(over / max_characters, 0.0), 1.0)


def language_consistency(response: str, prompt: str) -> float:
    """Return the fraction of the response's letters in scripts that the prompt also uses; 1 without letters.

    DeepSeek-R1 rewards the share of words in the target language (arXiv:2501.12948). Scripts distinguish, for example,
    Chinese from English, but not English from French.
    """
    allowed = {_script(character) for character in prompt if character.isalpha()}
    letters = [character for character in response if character.isalpha()]
    if not letters or not allowed:
        return 1.0
    return sum(_script(character) in allowed for character in letters) / len(letters)


def _script(letter: str) -> str:
    """Return the script of a letter, the first word of its Unicode name."""
    return unicodedata.name(letter, "UNKNOWN").partition(" ")[0].removesuffix("-")
