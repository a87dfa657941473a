"""Metrics of rollouts that older weights sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_core.rollouts.group import RolloutGroup


def staleness_metrics(groups: Sequence[RolloutGroup], version: int, *, max_staleness: int) -> dict[str, float]:
    """Ages of the sampled tokens, in weight versions; none if no token was sampled.

    Args:
        groups: Groups trained on.
        version: Version of the weights that train on the groups.
        max_staleness: Bound of the ages; each age up to it has its own share.
    """
    by_rollout = [spans for group in groups for spans in group.rollouts.spans if spans]
    if not by_rollout:
        return {}
    spans = np.array([span for spans in by_rollout for span in spans], dtype=np.int64)
    ages, num_tokens = version - spans[:, 0], spans[:, 1]
    total = max(1, int(num_tokens.sum()))
    is_mixed = [len({sampled_by for sampled_by, _ in spans}) > 1 for spans in by_rollout]
    metrics = {
        "staleness/mean": float((ages * num_tokens).sum() / total),
        "staleness/max": float(ages.max()),
        "staleness/several_versions": float(np.mean(is_mixed)),
    }
    shares = {age: float(num_tokens[ages == age].sum() / total) for age in range(max_staleness + 1)}
    return metrics | {f"staleness/share_{age}": share for age, share in shares.items()}
