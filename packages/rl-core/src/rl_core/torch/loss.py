"""Inputs and results of a loss implementation, and the scalar that a step makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl_core.data.batch import TOKENS
from rl_core.model import UNDIVIDED
from rl_core.torch.host_arrays import to_device


@dataclass(frozen=True)
class Rows:
    """The rows of one microbatch, end to end, whole even if the backend splits sequences.

    Args:
        offsets: Int64 `[rows + 1]`, where each row starts and ends in the flat tokens.
        columns: Token-aligned columns `[tokens]` and row columns `[rows]`, on the compute device.
    """

    offsets: Tensor
    columns: Mapping[str, Tensor]

    @classmethod
    def laid_out(
        cls,
        offsets: Tensor,
        columns: Mapping[str, Tensor],
        host_offsets: np.ndarray,
        host_columns: Mapping[str, np.ndarray],
    ) -> Rows:
        """Return rows that the host has too, so that it does not wait for the device to read them.

        Args:
            offsets: Where each row starts and ends.
            columns: Columns on the compute device.
            host_offsets: The offsets on the host.
            host_columns: Columns on the host, all or some.
        """
        rows = cls(offsets, columns)
        # not fields: `dataclasses.replace` would keep them with other offsets
        rows.__dict__.update(host_offsets=host_offsets, _host_columns=host_columns)
        return rows

    @cached_property
    def host_offsets(self) -> np.ndarray:
        """Int64 `[rows + 1]`, the offsets on the host; waits for the device unless the rows were made with them."""
        return self.offsets.cpu().numpy()

    @cached_property
    def _host_columns(self) -> Mapping[str, np.ndarray]:
        return {}

    def host_column(self, name: str) -> np.ndarray:
        """Return a column on the host; waits for the device unless the rows were made with it."""
        found = self._host_columns.get(name)
        return self.columns[name].cpu().numpy() if found is None else found

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows."""
        return int(self.host_offsets[-1])

    @cached_property
    def followers(self) -> Tensor:
        """int64 indices of the tokens that follow another in their row: all but the first of each."""
        return to_device([followers_of(self.host_offsets)], self.offsets.device)[0]

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
        return torch.repeat_interleave(rows, self.offsets.diff(), output_size=self.num_tokens)

    def row_sums(self, values: Tensor) -> Tensor:
        """Return `[rows]`, the sum of token values over each row; differentiable, float32 or wider."""
        sums = torch.zeros(len(self), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.row_of_token, values)

    def spread(self, values: Tensor) -> Tensor:
        """Return `[tokens]`, each row's value at all its tokens."""
        return values[self.row_of_token]

    def select(self, chosen: np.ndarray) -> tuple[Rows, Tensor]:
        """Return some of the rows, and int64 `[tokens]`, the indices of their tokens.

        Args:
            chosen: Indices of rows, on the host.
        """
        ends, lengths = self.host_offsets[1:], np.diff(self.host_offsets)[chosen]
        host_offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(int(host_offsets[-1])) + np.repeat(ends[chosen] - host_offsets[1:], lengths)
        offsets, tokens, rows = to_device([host_offsets, at, chosen], self.offsets.device)
        num_tokens = len(self.columns[TOKENS])
        columns = {name: each[tokens if len(each) == num_tokens else rows] for name, each in self.columns.items()}
        host = {name: each[at if len(each) == num_tokens else chosen] for name, each in self._host_columns.items()}
        return Rows.laid_out(offsets, columns, host_offsets, host), tokens

    def per_token(self, name: str) -> Tensor:
        """Return `[tokens]`, a column at every token; a row column has the row's value at each."""
        values = self.columns[name]
        # every row has at least one token, so that equal counts mean one token in each
        return values if len(values) == len(self.columns[TOKENS]) else self.spread(values)


def followers_of(offsets: np.ndarray) -> np.ndarray:
    """Return int64 indices of the tokens that follow another in their row.

    Args:
        offsets: Where each row starts and ends.
    """
    is_follower = np.ones(int(offsets[-1]) + 1, dtype=bool)
    is_follower[offsets] = False
    return np.flatnonzero(is_follower)


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
        """Return this microbatch's share of the loss; a total of zero contributes zero."""
        counts = {**totals, UNDIVIDED: 1.0}
        terms = [value / counts[name] if counts[name] else value * 0.0 for name, value in self.objective.items()]
        return torch.stack(terms).sum()
