"""The pairs of a microbatch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.data.microbatch import PAIR
from rl_core.torch.loss import MetricSum, Rows


@dataclass(frozen=True)
class Pairs:
    """Which rows are the two responses of each pair.

    Args:
        chosen, rejected: int64 `[pairs]`, rows of the microbatch.
    """

    chosen: Tensor
    rejected: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Pairs:
        """From the columns `pair` and `is_chosen`; every pair must be whole."""
        by_pair = torch.argsort(rows[PAIR], stable=True)
        is_chosen = rows["is_chosen"][by_pair] > 0
        return cls(by_pair[is_chosen], by_pair[~is_chosen])

    def metrics(self, chosen: Tensor, rejected: Tensor) -> dict[str, MetricSum]:
        """Accuracy and margin of rewards `[pairs]`, and their means; equal rewards count as half right."""
        values = {
            "accuracy": right(chosen - rejected),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
        }
        return {name: MetricSum(value.detach().sum(), "pairs") for name, value in values.items()}


def right(differences: Tensor) -> Tensor:
    """1 if a difference is above 0, 0 if it is below, and one half if it is 0."""
    return (differences.sign() + 1) / 2
