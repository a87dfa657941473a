"""From rollout groups to a training batch, and its minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.rewards import are_cut
from rl_algos.rollouts.routing import with_routing
from rl_core.batch import Batch, Column
from rl_core.ragged import Ragged
from rl_core.rollout import LOSS_MASK, RECORD, RolloutGroup

Advantages = np.ndarray | Ragged
"""float64, `[rollouts]` or token-aligned `[tokens]`."""


def build_batch(groups: Sequence[RolloutGroup], config: RolloutConfig) -> Batch:
    """One row per rollout: `tokens`, `loss_mask` and `generation_logprobs` by token.

    Rollouts that train nothing (failed; cut off, with overlong filtering) have an empty loss mask. The token-aligned
    columns stay where they are.
    """
    parts = with_routing([group.columns for group in groups])
    shared = set.intersection(*(set(part) for part in parts)) - {RECORD}
    names = [name for name in parts[0] if name in shared]
    batch = Batch.concat([part.only(names) for part in parts])
    if config.overlong_filtering:
        batch = batch.with_zeros(LOSS_MASK, are_cut(groups, config.max_rollout_turns))
    return batch


def with_advantages(batch: Batch, advantages: Advantages) -> Batch:
    """The batch with `advantages`, float32 by row or by token."""
    if isinstance(advantages, Ragged):
        single: Column = advantages.like(advantages.values.astype(np.float32))
    else:
        single = advantages.astype(np.float32)
    return batch.with_columns({"advantages": single})


def minibatches(batch: Batch, rows: int) -> Iterator[Batch]:
    """Consecutive parts of `rows` rows, one optimizer step each; the last may be smaller."""
    for start in range(0, len(batch), rows):
        yield batch.select(np.arange(start, min(start + rows, len(batch))))


def shuffled_minibatches(batch: Batch, rows: int, *, passes: int, seed: Sequence[int]) -> Iterator[Batch]:
    """The minibatches of several passes over the batch, each in an order of its own that follows from the seed."""
    for number in range(passes):
        order = np.random.default_rng((*seed, number)).permutation(len(batch))
        yield from minibatches(batch.select(order), rows)
