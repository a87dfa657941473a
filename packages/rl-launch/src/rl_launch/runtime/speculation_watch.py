"""Watch over speculative decoding: what it saved since a step, and whether it pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import reduce
from operator import add

from rl_core.errors import RLError
from rl_core.ray.calls import fetch
from rl_core.rollouts.speculation import SpeculationCounts
from rl_launch.runtime.replica import Replica

_log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Bound of asking all replicas for their counts."""


class SpeculationWatch:
    """Counts of the engines of a run, by step. Engines that decode without drafts are asked once."""

    def __init__(self) -> None:
        self._before: dict[Replica, SpeculationCounts] = {}
        self._is_off = False
        self._paid = True

    def take(self, replicas: Sequence[Replica]) -> SpeculationCounts | None:
        """Return the counts since the last call, of replicas that answer; None if there are none. Logs a warning in the
        first of several steps in which speculation does not pay.

        Args:
            replicas: Replicas that are alive.
        """
        if self._is_off:
            return None
        answers = self._answers(replicas)
        self._is_off = bool(answers) and not any(answers.values())
        counts = {replica: answer for replica, answer in answers.items() if answer is not None}
        if not counts:
            return None
        since = [now.since(self._before[each]) if each in self._before else now for each, now in counts.items()]
        self._before |= counts
        found = reduce(add, since)
        if self._paid and not found.pays:
            _log.warning(
                "speculative decoding does not pay: requests got %.2f tokens per engine step, below "
                "speculation.min_tokens_per_step (%g), the break-even. Remove policy.generation.vllm_cfg.speculation, "
                "or use a drafter that is closer to the policy",
                found.tokens_per_step,
                found.break_even,
            )
        self._paid = found.pays
        return found

    def _answers(self, replicas: Sequence[Replica]) -> dict[Replica, SpeculationCounts | None]:
        calls = [(replica, replica.call("health")) for replica in replicas]
        end = time.monotonic() + TIMEOUT_S
        answers: dict[Replica, SpeculationCounts | None] = {}
        for replica, call in calls:
            try:
                health = fetch(call, replica.origin("speculation"), max(0.0, end - time.monotonic()))
            except RLError as error:
                # a broken one is noticed and replaced by the next call that needs it
                _log.debug("%s", error)
                continue
            answers[replica] = SpeculationCounts.of_health(health)
        return answers
