"""Rewards for training: scaled, and lowered by the ending, the repetitions and the format of a response."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from rl_algos.rollouts.config import PolicyGradientConfig, RewardScalingConfig, RewardShapingConfig
from rl_algos.rollouts.training.segments import whole_rollouts
from rl_core.data.batch import TOKENS
from rl_core.rollouts.group import LOSS_MASK, RECORD, RolloutGroup
from rl_core.rollouts.record import turns_of
from rl_core.rollouts.thoughts import only_thoughts

EFFORT = "effort"
"""Field of a row of data with its level of effort."""


def scores_of(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return float64 `[rollouts]`, rewards as the environments gave them; NaN for failed rollouts."""
    return np.concatenate([group.rewards() for group in groups])


def lengths_of(groups: Sequence[RolloutGroup]) -> np.ndarray:
    """Return int64 `[rollouts]`, sampled tokens."""
    return np.array([length for group in groups for length in group.rollouts.num_sampled], dtype=np.int64)


def trained_rewards(groups: Sequence[RolloutGroup], config: PolicyGradientConfig) -> np.ndarray:
    """Return float64 `[rollouts]`, rewards scaled and then shaped; NaN for failed rollouts."""
    rewards, shaping = scale_rewards(scores_of(groups), config.reward_scaling), config.reward_shaping
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        cut = are_cut(groups, config.turn_limit)
        rewards = np.where(cut, rewards * shaping.stop_properly_penalty_coef, rewards)
    rewards = rewards - shaping.overlong_buffer_penalty * overlong_share(
        lengths_of(groups), shaping, limits=response_limits(groups, shaping)
    )
    if shaping.length_penalty:
        rewards = rewards + shaping.length_penalty * np.concatenate([length_rewards(group) for group in groups])
    if shaping.repetition_penalty:
        sampled = (
            tokens[mask > 0]
            for group in groups
            for tokens, mask in zip(
                whole_rollouts(group.columns.ragged(TOKENS), [group]),
                whole_rollouts(group.columns.ragged(LOSS_MASK), [group]),
                strict=True,
            )
        )
        shares = [repeated_share(tokens, shaping.repetition_ngram_size) for tokens in sampled]
        rewards = rewards - shaping.repetition_penalty * np.array(shares)
    if shaping.malformed_thinking_penalty or shaping.invalid_tool_call_penalty:
        records = [json.loads(record.tobytes()) for group in groups for record in group.records.ragged(RECORD)]
        rollouts = [turns_of(record) for record in records]
        thinking = np.array([any(only_thoughts(turn["text"]) is None for turn in turns) for turns in rollouts])
        calls = np.array([any(turn.get("has_invalid_call") for turn in turns) for turns in rollouts])
        rewards = rewards - shaping.malformed_thinking_penalty * thinking - shaping.invalid_tool_call_penalty * calls
    return rewards


def varies(group: RolloutGroup) -> bool:
    """Return whether the rewards of rollouts that are compared differ, so that training on the group changes the
    policy."""
    rewards = group.rewards()
    is_usable = ~np.isnan(rewards)
    return any(np.ptp(rewards[own & is_usable]) > 0 for own in compared(group) if (own & is_usable).any())


def compared(group: RolloutGroup) -> Iterator[np.ndarray]:
    """Yield bool `[rollouts]` for each set of rollouts that are compared with one another. They have one agent and one
    name of peers; if a play has one agent, the set is all rollouts."""
    keys = group.rollouts.compared
    for key in dict.fromkeys(keys):
        yield np.array([each == key for each in keys])


def scale_rewards(rewards: np.ndarray, scaling: RewardScalingConfig) -> np.ndarray:
    """Map rewards linearly from the source range to the target range, clamped at its ends; NaN stays NaN."""
    if not scaling.enabled:
        return rewards
    share = (rewards - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + np.clip(share, 0.0, 1.0) * (scaling.target_max - scaling.target_min)


def response_limits(groups: Sequence[RolloutGroup], shaping: RewardShapingConfig) -> np.ndarray:
    """Return int64 `[rollouts]`, the tokens that a response may have, by its prompt's level of effort if it has one."""
    if not shaping.effort_levels:
        return np.full(sum(len(group.rollouts) for group in groups), shaping.max_response_length)
    of_group = [
        shaping.effort_levels.get(group.prompt.info.get(EFFORT, ""), shaping.max_response_length) for group in groups
    ]
    return np.repeat(np.array(of_group, dtype=np.int64), [len(group.rollouts) for group in groups])


def length_rewards(group: RolloutGroup) -> np.ndarray:
    """Return float64 `[rollouts]`, the length reward (Kimi k1.5, arXiv:2501.12599) within the compared rollouts of a
    group: `w = 0.5 - (n - shortest) / (longest - shortest)` of the n sampled tokens for a reward above 0, else
    `min(w, 0)`; 0 if all lengths are equal. Failed rollouts count for nothing.
    """
    rewards, lengths = group.rewards(), np.array(group.rollouts.num_sampled, dtype=np.float64)
    found = np.zeros(len(rewards))
    for own in compared(group):
        usable = own & ~np.isnan(rewards)
        if not usable.any() or np.ptp(lengths[usable]) == 0:
            continue
        w = 0.5 - (lengths[usable] - lengths[usable].min()) / np.ptp(lengths[usable])
        found[usable] = np.where(rewards[usable] > 0, w, np.minimum(w, 0.0))
    return found


def overlong_share(
    num_sampled: np.ndarray, shaping: RewardShapingConfig, *, limits: np.ndarray | None = None
) -> np.ndarray:
    """Return `[rollouts]`, the share of the overlong penalty: 0 up to the buffer before the limit, then linearly up to
    1 at the limit (DAPO, arXiv:2503.14476).

    Args:
        num_sampled: `[rollouts]`, sampled tokens of each.
        shaping: Limit and buffer.
        limits: `[rollouts]`, the limit of each; None for the limit of `shaping`.
    """
    start = (shaping.max_response_length if limits is None else limits) - shaping.overlong_buffer_length
    share: np.ndarray = np.clip((num_sampled - start) / shaping.overlong_buffer_length, 0.0, 1.0)
    return share


def repeated_share(tokens: np.ndarray, size: int) -> float:
    """Return the share of the runs of `size` tokens that have occurred before (arXiv:2502.03373); 0 for fewer tokens.

    Args:
        tokens: int32 `[tokens]`, sampled.
        size: Number of tokens of a run.
    """
    num_runs = len(tokens) - size + 1
    if num_runs < 2:
        return 0.0
    # Each run becomes one number by Horner's rule modulo 2^64 with an odd factor.
    runs = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(size):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + num_runs].astype(np.uint64)
    return 1 - len(np.unique(runs)) / num_runs


def are_cut(groups: Sequence[RolloutGroup], max_turns: int) -> np.ndarray:
    """Return bool `[rollouts]`, True if a rollout ran into a token limit: in a completion, or because an observation
    did not fit after it. A rollout that ended at the last turn allowed was not cut by a token limit.
    """
    return np.array(
        [
            stop_reason == "length" or (stop_reason == "stop" and status == "truncated" and num_turns < max_turns)
            for group in groups
            for stop_reason, status, num_turns in zip(
                group.rollouts.stop_reason, group.rollouts.status, group.rollouts.num_turns, strict=True
            )
        ]
    )
