"""A warning about rewards that teach nothing."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rl_core.errors import RLError
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.record import turns_of

PATIENCE = 3
"""Successive steps with equal rewards before the warning."""

_MOST_GROUPS, _MOST_RESPONSES, _MOST_CHARACTERS = 8, 3, 60

_log = logging.getLogger(__name__)


class RewardWatch:
    """Warns once if all rollouts of successive steps have earned the same, and none earned less before; shows what they
    answered.

    Equal rewards above earlier ones are those of a policy that has learned its task.
    """

    def __init__(self) -> None:
        self._num_steps, self._num_rollouts = 0, 0
        self._reward = self._lowest = np.inf
        self._has_warned = False

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Look at the rollouts of a step, until the warning was given."""
        if self._has_warned:
            return
        scored = [group for group in groups if any("reward" in each for each in group.rollouts.rewards)]
        rewards = np.concatenate([group.rewards() for group in scored]) if scored else np.zeros(0)
        rewards = rewards[np.isfinite(rewards)]
        if not len(rewards):
            return
        self._lowest = min(self._lowest, float(rewards.min()))
        if np.any(rewards != self._lowest):
            self._num_steps, self._num_rollouts = 0, 0
            return
        if self._reward != self._lowest:
            self._num_steps, self._num_rollouts, self._reward = 0, 0, self._lowest
        self._num_steps += 1
        self._num_rollouts += len(rewards)
        if self._num_steps == PATIENCE:
            self._has_warned = True
            _log.warning("%s", self._text(scored))

    def _text(self, groups: Sequence[RolloutGroup]) -> str:
        said = (
            f"all {self._num_rollouts} rollouts of {PATIENCE} steps in a row have the same reward, {self._reward:.4g}, "
            "so the policy learns nothing"
        )
        common = ", ".join(f"{text!r} ({count}x)" for text, count in commonest(groups[:_MOST_GROUPS]))
        shown = f"; most often they end with {common}" if common else ""
        names = ", ".join(sorted({group.prompt.environment for group in groups}))
        reads = "can read such responses" if self._reward == 0 else "tells such responses apart"
        return (
            f"{said}{shown}. Check that the environment {names} {reads}: `rl env check` shows what its "
            "code looks for, `rl env run` scores a response that you type, and `rl show` lists more of them"
        )


def commonest(groups: Iterable[RolloutGroup], number: int = _MOST_RESPONSES) -> list[tuple[str, int]]:
    """Return the most frequent last turns of rollouts, shortened, with their counts; none if the records are lost."""
    found: Counter[str] = Counter()
    try:
        for group in groups:
            for record in group.records.ragged(RECORD):
                turns = turns_of(json.loads(record.tobytes()))
                found.update([_shortened(turns[-1]["text"])] if turns else [])
    except RLError:
        return []
    return found.most_common(number)


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MOST_CHARACTERS else f"...{text[-_MOST_CHARACTERS:]}"
