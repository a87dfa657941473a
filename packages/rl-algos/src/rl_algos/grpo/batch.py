"""From rollout groups to a training batch, and its minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rl_algos.grpo.advantages import Advantages
from rl_algos.grpo.config import GRPOConfig
from rl_core.batch import Batch, Column
from rl_core.model import LOGPROBS, Loss, Model
from rl_core.ragged import Ragged
from rl_core.rollout import LOSS_MASK, RECORD, RolloutGroup


def build_batch(groups: Sequence[RolloutGroup], advantages: Advantages, config: GRPOConfig) -> Batch:
    """One row per rollout: `tokens`, `loss_mask` and `generation_logprobs` by token, `advantages` by row or by token.

    Rollouts that train nothing (failed; cut off, with overlong filtering) have an empty loss mask. The token-aligned
    columns stay where they are.
    """
    # a failed rollout has no routed experts, for one
    shared = set.intersection(*(set(group.columns) for group in groups)) - {RECORD}
    names = [name for name in groups[0].columns if name in shared]
    batch = Batch.concat([group.columns.only(names) for group in groups])
    if isinstance(advantages, Ragged):
        single: Column = advantages.like(advantages.values.astype(np.float32))
    else:
        single = advantages.astype(np.float32)
    batch = batch.with_columns({"advantages": single})
    if config.overlong_filtering:
        cut = [rollout.stop_reason == "length" for group in groups for rollout in group.rollouts]
        batch = batch.with_zeros(LOSS_MASK, np.array(cut))
    return batch


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
