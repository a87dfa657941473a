"""Failed rollouts: warnings about them, and the share of them that ends a run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rl_algos.evaluation.reasons import cause_of, listed, reason_counts
from rl_core.errors import RolloutsFailed
from rl_core.rollouts.group import RolloutGroup

_log = logging.getLogger(__name__)

TOLD_EVERY = 10
"""Number of calls after which a cause of failures that persists is reported again, if its failures have not doubled
before."""


class FailureWatch:
    """Checks rollouts as they are collected: some failures are a warning, too many end the run.

    A cause is reported when it first occurs, then whenever its failures have doubled, and after `TOLD_EVERY` calls; a
    report counts all failures since the start.

    Args:
        max_failed_share: Largest share of the rollouts of one call. If all of them failed there is nothing to train
            on, and the run ends whatever the share.
        section: Config section of that share, named in messages.
    """

    def __init__(self, max_failed_share: float, *, section: str = "") -> None:
        self._max_failed_share = max_failed_share
        self._key = ".".join(filter(None, (section, "max_failed_share")))
        self._num_calls = 0
        self._num_rollouts = 0
        self._causes: dict[str, _Cause] = {}

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """Warn of failures among groups that were rolled out together.

        Raises:
            RolloutsFailed: If too many of their rollouts failed, counting the reasons, with a row as an example.
        """
        self._num_calls += 1
        # a play of several rollouts fails as one
        num_rollouts = sum(group.num_plays for group in groups)
        self._num_rollouts += num_rollouts
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
        for cause, count in counts.items():
            known = self._causes.setdefault(cause, _Cause(examples[cause][1].failure))
            known.count += count
        if any(self._causes[cause].is_news(self._num_calls) for cause in counts):
            _log.warning("%s and do not train: %s%s", share, reasons, self._so_far(len(failed)))
            for cause in counts:
                self._causes[cause].tell(self._num_calls)

    def _so_far(self, num_failed: int) -> str:
        """All failures since the start; empty if they are those of this call."""
        total = sum(cause.count for cause in self._causes.values())
        if total == num_failed:
            return ""
        commonest = sorted(self._causes.values(), key=lambda cause: -cause.count)
        reasons = listed({next(iter(reason_counts([cause.example]))): cause.count for cause in commonest})
        return f". Since the start {total} of {self._num_rollouts}: {reasons}"


@dataclass
class _Cause:
    """Failures of one cause.

    Args:
        example: The first of them.
        count: Number of failures.
        told: Number of failures at the last report.
        told_at: Number of the call of that report; None before the first.
    """

    example: str
    count: int = 0
    told: int = 0
    told_at: int | None = None

    def is_news(self, call: int) -> bool:
        """Return whether the cause is to be reported at a call."""
        return self.told_at is None or self.count >= 2 * self.told or call - self.told_at >= TOLD_EVERY

    def tell(self, call: int) -> None:
        """Note that it is reported."""
        self.told, self.told_at = self.count, call
