"""Failed rollouts: warnings about them, and the share of them that ends a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from rl_algos.evaluation.reasons import cause_of, listed, reason_counts
from rl_core.errors import RolloutsFailed
from rl_core.rollout import RolloutGroup

_log = logging.getLogger(__name__)

TOLD_EVERY = 10
"""Calls after which a cause of failures that persists is reported again."""


class FailureWatch:
    """Checks rollouts as they are collected: some failures are a warning, too many end the run.

    Each cause is reported once in every `TOLD_EVERY` calls.

    Args:
        max_failed_share: largest share of the rollouts of one call. If all of them failed there is nothing to train
            on, and the run ends whatever the share.
        section: config section of that share, named in messages.
    """

    def __init__(self, max_failed_share: float, *, section: str = "") -> None:
        self._max_failed_share = max_failed_share
        self._key = ".".join(filter(None, (section, "max_failed_share")))
        self._num_calls = 0
        self._told: dict[str, int] = {}

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """Warn of failures among groups that were rolled out together.

        Raises:
            RolloutsFailed: if too many of their rollouts failed, counting the reasons, with a row as an example.
        """
        self._num_calls += 1
        num_rollouts = sum(len(group.rollouts) for group in groups)
        with_failures = [group for group in groups if "failed" in group.rollouts.status]
        rollouts = [(group.prompt, rollout) for group in with_failures for rollout in group.rollouts]
        failed = [(prompt, rollout) for prompt, rollout in rollouts if rollout.status == "failed"]
        if not failed:
            return
        share = f"{len(failed)} of {num_rollouts} rollouts failed"
        counts = Counter(cause_of(rollout.failure) for _, rollout in failed)
        examples = {cause_of(rollout.failure): (prompt, rollout) for prompt, rollout in reversed(failed)}
        reasons = listed(reason_counts([rollout.failure for _, rollout in failed]))
        if len(failed) == num_rollouts or len(failed) > self._max_failed_share * num_rollouts:
            allowed = f", more than {self._key}={self._max_failed_share:g} allows"
            prompt, rollout = examples[counts.most_common(1)[0][0]]
            raise RolloutsFailed(
                f"{share}{allowed if len(failed) < num_rollouts else ', so there is nothing to train on'}: "
                f"{reasons}. For example, {prompt}: {rollout.failure}"
            )
        news = [cause for cause in counts if self._is_news(cause)]
        if news:
            _log.warning("%s and train nothing: %s", share, reasons)

    def _is_news(self, cause: str) -> bool:
        is_news = self._num_calls - self._told.get(cause, -TOLD_EVERY) >= TOLD_EVERY
        if is_news:
            self._told[cause] = self._num_calls
        return is_news
