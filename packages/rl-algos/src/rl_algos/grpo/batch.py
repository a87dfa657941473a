"""From rollout groups to a training batch, and its minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rl_algos.grpo.advantages import clip_advantages, group_advantages
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.rewards import scale_rewards, shape_rewards
from rl_core.batch import Batch
from rl_core.model import LOGPROBS, Loss, Model
from rl_core.ragged import Ragged
from rl_core.rollout import RolloutGroup


def advantages_of(groups: Sequence[RolloutGroup], config: GRPOConfig) -> np.ndarray:
    """float64 `[rollouts]`, in the order of groups and of rollouts within them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.concatenate([group.rewards() for group in groups])
    rewards = scale_rewards(rewards, config.reward_scaling)
    rewards = shape_rewards(rewards, np.array([r.num_sampled for r in rollouts]), config.reward_shaping)
    group_of = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    advantages = group_advantages(
        rewards,
        group_of,
        normalize=config.normalize_rewards,
        leave_one_out=config.use_leave_one_out_baseline,
    )
    return clip_advantages(advantages, config.advantage_clip_low, config.advantage_clip_high)


def build_batch(groups: Sequence[RolloutGroup], advantages: np.ndarray, config: GRPOConfig) -> Batch:
    """One row per rollout: `tokens`, `loss_mask`, `generation_logprobs` by token, `advantages` by row.

    Rollouts that train nothing (failed; cut off, with overlong filtering) have an empty loss mask.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    masks = [
        np.zeros_like(r.loss_mask) if config.overlong_filtering and r.stop_reason == "length" else r.loss_mask
        for r in rollouts
    ]
    return Batch(
        {
            "tokens": Ragged.from_rows([r.tokens for r in rollouts], np.int32),
            "loss_mask": Ragged.from_rows(masks, np.uint8),
            "generation_logprobs": Ragged.from_rows([r.generation_logprobs for r in rollouts], np.float32),
            "advantages": advantages.astype(np.float32),
        }
    )


def with_logprobs(batch: Batch, policy: Model, loss: Loss) -> Batch:
    """The batch with `prev_logprobs` and `ref_logprobs`, as far as the loss asks for them."""
    for column, reference in (("prev_logprobs", False), ("ref_logprobs", True)):
        if column in loss.columns:
            read = policy.infer(batch, [LOGPROBS], reference=reference, temperature=loss.temperature)
            batch = batch.with_columns({column: read.columns["logprobs"]})
    return batch


def minibatches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Consecutive parts of `rows` rows, one optimizer step each; the last may be smaller."""
    for start in range(0, len(batch), rows):
        yield batch.select(np.arange(start, min(start + rows, len(batch))))
