"""Watches over the rollouts of a run: failures, rewards that teach nothing, and fields without effect."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_algos.evaluation.summary import cause_of, listed, reason_counts
from rl_algos.rollouts.training.metrics import PREFIX
from rl_core.errors import RLError, RolloutsFailed
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.record import turns_of

_log = logging.getLogger(__name__)

REPORT_EVERY = 10
"""Number of calls after which a cause of failures that persists is reported again, if its failures have not doubled
before."""


class FailureWatch:
    """Checks rollouts as they are collected: some failures are a warning, too many end the run.

    A cause is reported when it first occurs, then whenever its failures have doubled, and after `REPORT_EVERY` calls; a
    report counts all failures since the start.

    Args:
        max_failed_share: Largest share of the rollouts of one call. If all of them failed there is nothing to train
            on, and the run ends whatever the share.
        section: Config section of that share, for messages.
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
            RolloutsFailed: If too many of their rollouts failed; lists the reasons with their counts and an example.
        """
        self._num_calls += 1
        # A play of several rollouts fails as one.
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
                known = self._causes[cause]
                known.reported, known.reported_at = known.count, self._num_calls

    def _so_far(self, num_failed: int) -> str:
        """Return all failures since the start as text; empty if all of them are in this call."""
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
        example: First failure.
        count: Number of failures.
        reported: Number of failures at the last report.
        reported_at: Number of the call of that report; None before the first.
    """

    example: str
    count: int = 0
    reported: int = 0
    reported_at: int | None = None

    def is_news(self, call: int) -> bool:
        """Return whether the cause is to be reported at a call."""
        if self.reported_at is None:
            return True
        return self.count >= 2 * self.reported or call - self.reported_at >= REPORT_EVERY


PATIENCE = 3
"""Successive steps with equal rewards before the warning."""

_MAX_GROUPS, _MAX_RESPONSES, _MAX_CHARACTERS = 8, 3, 60


class RewardWatch:
    """Warns once if all rollouts of successive steps have earned the same, and none earned less before; shows their
    answers.

    A policy that has learned its task has equal rewards as well, but they are above earlier ones.
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
        common = ", ".join(f"{text!r} ({count}x)" for text, count in commonest(groups[:_MAX_GROUPS]))
        shown = f"; most often they end with {common}" if common else ""
        names = ", ".join(sorted({group.prompt.environment for group in groups}))
        reads = "can read such responses" if self._reward == 0 else "tells such responses apart"
        return (
            f"{said}{shown}. Check that the environment {names} {reads}: `rl env check` shows what its "
            "code looks for, `rl env run` scores a response that you type, and `rl show` lists more of them"
        )


def commonest(groups: Iterable[RolloutGroup]) -> list[tuple[str, int]]:
    """Return the most frequent last turns of rollouts, shortened, with their counts; none if the records are lost."""
    found: Counter[str] = Counter()
    try:
        for group in groups:
            for record in group.records.ragged(RECORD):
                if turns := turns_of(json.loads(record.tobytes())):
                    text = turns[-1]["text"].strip()
                    found[text if len(text) <= _MAX_CHARACTERS else f"...{text[-_MAX_CHARACTERS:]}"] += 1
    except RLError:
        return []
    return found.most_common(_MAX_RESPONSES)


class IgnoredFieldsWatch:
    """Warns of each field once in a run."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """Warn of the fields that agents of these rollouts have set, and no earlier ones."""
        infos = (info for group in groups for info in group.rollouts.info)
        found = {name.removeprefix(PREFIX) for info in infos for name in info if name.startswith(PREFIX)}
        if new := sorted(found - self._known):
            self._known |= found
            _log.warning(
                "agents set %s, without effect: policy.generation decides how completions are drawn, and the policy "
                "whether it calls a tool",
                ", ".join(new),
            )
