"""Rewards as they are trained on: scaled, and lowered for what an environment does not see."""

from __future__ import annotations

import numpy as np

from rl_algos.grpo.config import RewardScalingConfig, RewardShapingConfig


def scale_rewards(rewards: np.ndarray, scaling: RewardScalingConfig) -> np.ndarray:
    """Rewards mapped linearly from the source range to the target range, clamped at its ends; NaN stays NaN."""
    if not scaling.enabled:
        return rewards
    share = (rewards - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + np.clip(share, 0.0, 1.0) * (scaling.target_max - scaling.target_min)


def shape_rewards(rewards: np.ndarray, num_sampled: np.ndarray, shaping: RewardShapingConfig) -> np.ndarray:
    """Rewards lowered for length: a penalty that grows linearly over the buffer before the limit (DAPO,
    arXiv:2503.14476).

    Args:
        rewards: float `[rollouts]`.
        num_sampled: `[rollouts]`, sampled tokens of each.
        shaping: limit, buffer and penalty.
    """
    if not shaping.enabled:
        return rewards
    start = shaping.max_response_length - shaping.overlong_buffer_length
    share = np.clip((num_sampled - start) / shaping.overlong_buffer_length, 0.0, 1.0)
    return rewards - shaping.overlong_buffer_penalty * share
