"""The share of rollouts that may fail before a run stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rl_core.errors import RolloutsFailed
from rl_core.rollout import RolloutGroup

MOST_REASONS = 5
"""Reasons listed in a message, the commonest first."""

_REASON_LENGTH = 160


def check_failures(groups: Sequence[RolloutGroup], max_failed_share: float) -> None:
    """Refuse to go on with groups of which too many rollouts failed: a broken environment trains on nothing.

    Args:
        groups: rolled out together.
        max_failed_share: of all their rollouts.

    Raises:
        RolloutsFailed: counting the reasons, with one prompt as an example.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if rollout.status == "failed"]
    if len(failed) <= max_failed_share * len(rollouts):
        return
    counts = Counter(rollout.failure.splitlines()[0][:_REASON_LENGTH] if rollout.failure else "" for rollout in failed)
    listed = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(MOST_REASONS))
    others = f"; and {len(counts) - MOST_REASONS} other reasons" if len(counts) > MOST_REASONS else ""
    commonest = counts.most_common(1)[0][0]
    example = next(rollout for rollout in failed if rollout.failure.startswith(commonest))
    raise RolloutsFailed(
        f"{len(failed)} of {len(rollouts)} rollouts failed, more than grpo.max_failed_share={max_failed_share:g} "
        f"allows: {listed}{others}. For example, prompt {example.prompt_id}: {example.failure}"
    )
