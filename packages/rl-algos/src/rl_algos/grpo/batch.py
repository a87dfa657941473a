"""From rollout groups to a training batch, and its minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rl_algos.grpo.advantages import Advantages
from rl_algos.grpo.config import GRPOConfig
from rl_core.batch import Batch
from rl_core.model import LOGPROBS, Loss, Model
from rl_core.ragged import Ragged
from rl_core.rollout import RolloutGroup


def build_batch(groups: Sequence[RolloutGroup], advantages: Advantages, config: GRPOConfig) -> Batch:
    """One row per rollout: `tokens`, `loss_mask` and `generation_logprobs` by token, `advantages` by row or by token.

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
            "advantages": advantages.like(advantages.values.astype(np.float32))
            if isinstance(advantages, Ragged)
            else advantages.astype(np.float32),
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
