"""Tokens brought to the experts that they chose, and the results of these brought back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from rl_core.torch.kernels.permutation import collect, group_by_expert, spread_weighted


@dataclass(frozen=True)
class Grouped:
    """Copies of tokens that chose this rank's experts, grouped by expert.

    Args:
        rows: `[rows, hidden]`.
        weights: `[rows]`, the router's weight of the expert's result for each row.
        ends: int32 `[experts]`, the end of the rows of each of this rank's experts. Rows after the last one belong to
            none and may have any values.
        combine: Function from the weighted outputs of the experts, `[rows, hidden]`, to their sum for each token that
            was dispatched, `[tokens, hidden]`; collective if the dispatch was.
    """

    rows: Tensor
    weights: Tensor
    ends: Tensor
    combine: Callable[[Tensor], Tensor]


def nothing() -> None:
    """Do nothing while tokens are on their way."""


class Dispatch(Protocol):
    """Brings the tokens of a layer to their experts. Gradients flow through both ways."""

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, num_experts: int, meanwhile: Callable[[], None] = nothing
    ) -> Grouped:
        """Dispatch tokens; collective over the ranks that share the experts.

        Args:
            hidden: `[tokens, hidden]`.
            ids: Chosen experts of all ranks, int64 `[tokens, k]`.
            weights: Weights of these, `[tokens, k]`.
            num_experts: Number of experts of each rank.
            meanwhile: Called once while tokens are on their way, for other work of the device.
        """
        ...


def group_tokens(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    num_experts: int,
    num_choices: int | None = None,
    *,
    fused: bool = True,
) -> Grouped:
    """Group tokens by expert on the rank that has the experts.

    Args:
        hidden: `[tokens, hidden]`.
        ids: Chosen experts, int64 `[tokens, k]`; `num_experts` stands for an expert elsewhere.
        weights: Weights of these, `[tokens, k]`.
        num_experts: Number of experts.
        num_choices: Number of choices of experts that are here; None for an upper bound, which the host knows without
            waiting for the device.
        fused: False to index also where kernels run.
    """
    places, ends = group_by_expert(ids, num_experts)
    num_rows = ids.numel() if num_choices is None else num_choices
    if not num_rows:  # All parameters need a gradient, even of zeros: FSDP2 reduces them together.
        num_rows, ends = 1, ends + 1
    rows, row_weights = spread_weighted(hidden, weights, places, num_rows, fused=fused)
    return Grouped(rows, row_weights, ends, partial(collect, places=places, fused=fused))
