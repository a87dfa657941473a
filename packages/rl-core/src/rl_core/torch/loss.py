"""Inputs and results of a loss implementation, and the scalar that a step makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rl_core.data.batch import TOKENS
from rl_core.model import UNDIVIDED


@dataclass(frozen=True)
class Rows:
    """The rows of one microbatch, end to end, whole even if the backend splits sequences.

    Args:
        offsets: Int64 `[rows + 1]`, where each row starts and ends in the flat tokens.
        columns: Token-aligned columns `[tokens]` and row columns `[rows]`, on the compute device.
    """

    offsets: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def row_of_token(self) -> Tensor:
        """int64 `[tokens]`, the row each token belongs to."""
        rows = torch.arange(len(self), device=self.offsets.device)
        return torch.repeat_interleave(rows, self.offsets.diff())

    def row_sums(self, values: Tensor) -> Tensor:
        """`[rows]`, the sum of token values over each row; differentiable, float32 or wider."""
        sums = torch.zeros(len(self), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.row_of_token, values)

    def spread(self, values: Tensor) -> Tensor:
        """`[tokens]`, each row's value at all its tokens."""
        return values[self.row_of_token]

    def per_token(self, name: str) -> Tensor:
        """`[tokens]`, a column at every token: that of a row column is the row's value."""
        values = self.columns[name]
        # every row has at least one token, so that equal counts mean one token in each
        return values if len(values) == len(self.columns[TOKENS]) else self.spread(values)


@dataclass(frozen=True)
class MetricSum:
    """A metric's part of one microbatch.

    Args:
        value: Scalar; for a mean the numerator.
        denominator: Name of a total of the loss, or a scalar of this microbatch; for a mean only.
        reduction: As in `rl_core.metrics.Metric`.
    """

    value: Tensor
    denominator: str | Tensor | None = None
    reduction: Literal["mean", "sum", "max", "min"] = "mean"


@dataclass(frozen=True)
class LossSums:
    """Sums over one microbatch.

    Args:
        objective: Name of a total (a key of `Loss.totals`) to the differentiable scalar that is divided by that total,
            taken over all microbatches and ranks; the loss is the sum of these quotients. That under `UNDIVIDED` is
            added as it is.
        metrics: What to report.
    """

    objective: Mapping[str, Tensor]
    metrics: Mapping[str, MetricSum] = field(default_factory=dict)

    def loss(self, totals: Mapping[str, float]) -> Tensor:
        """This microbatch's share of the loss; a total of zero contributes zero."""
        counts = {**totals, UNDIVIDED: 1.0}
        terms = [value / counts[name] if counts[name] else value * 0.0 for name, value in self.objective.items()]
        return torch.stack(terms).sum()
