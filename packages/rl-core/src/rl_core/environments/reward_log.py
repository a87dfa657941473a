"""Numbers and values that a reward function records next to its rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

import numpy as np

from rl_core.rollouts.environment import UnusableAnswer

LOG_PARAMETERS = ("log_metric", "log_extra")
"""Names of the parameters that a reward function is given a log by; methods of `RewardLog`."""

EXTRA = "extra"
"""Entry of a rollout's `info` with the values of `log_extra`, by column."""

_RECORDED = (type(None), bool, int, float, str, list, tuple, dict, np.generic, np.ndarray)


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
        """The `info` of each response; empty if nothing was recorded."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        infos: list[Mapping[str, Any]] = []
        for index in range(self._num_responses):
            extra = {column: values[index] for column, values in self._columns.items()}
            infos.append({**means, EXTRA: extra} if extra else means)
        return infos


def merged_info(info: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Join the `info` of two rewards of one turn; columns of `log_extra` of both stay."""
    extras = [each[EXTRA] for each in (info, other) if isinstance(each.get(EXTRA), Mapping)]
    joined = {**info, **other}
    return joined if len(extras) < 2 else {**joined, EXTRA: {**extras[0], **extras[1]}}
