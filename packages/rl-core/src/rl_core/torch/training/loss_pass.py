"""One loss over microbatches and ranks: totals, the share of each microbatch, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import PAIR
from rl_core.images import IMAGES
from rl_core.metrics import Metric, Reduction
from rl_core.model import UNDIVIDED, Loss, read_columns
from rl_core.plugins import resolve
from rl_core.torch.loss import LossSums, MetricSum, Rows
from rl_core.user_code import implementation_name

Compute = Callable[[Loss, Mapping[str, Tensor], Rows], LossSums]
"""A loss implementation: the loss, the columns of its reads, and the rows with the loss's columns."""


class LossPass:
    """One loss over a batch that is spread over data-parallel ranks and microbatches.

    The usage loop, the same on every rank::

        loss_pass = LossPass(loss, batch, group)
        for rows in microbatches:                    # rl_core.torch.rows.to_rows(loss_pass.columns.select(...))
            reads = forward(rows, loss.reads, loss.temperature)
            share = loss_pass.microbatch(rows, reads)
            (share * scale).backward()
        metrics = loss_pass.metrics()

    Args:
        loss: What to compute.
        batch: This rank's shard; it may have no rows.
        group: The data-parallel group, on a backend that reduces CPU tensors; the totals are summed over it.

    Raises:
        ValueError: If the batch lacks a column that the loss or one of its reads names.
    """

    def __init__(self, loss: Loss, batch: Batch, group: dist.ProcessGroup | None) -> None:
        self.loss = loss
        named = (*loss.columns, *read_columns(loss.reads))
        batch.require(TOKENS, *named)
        self.columns = batch.only([name for name in batch if name in {TOKENS, PAIR, IMAGES, *named}]).local()
        self._compute: Compute = resolve(implementation_name(loss, loss.implementation))
        self._local_totals = {name: float(total) for name, total in loss.totals(self.columns).items()}
        self.totals = _summed(self._local_totals, group)
        self._parts = _MetricParts()

    def microbatch(self, rows: Rows, reads: Mapping[str, Tensor]) -> Tensor:
        """This microbatch's share of the loss, a scalar with gradients; over all microbatches and ranks the shares
        add up to the loss."""
        sums = self._compute(self.loss, reads, rows)
        unknown = sorted(set(sums.objective) - set(self.totals) - {UNDIVIDED})
        if unknown:
            raise ValueError(
                f"{self.loss.implementation} returned sums over {unknown}, but Loss.totals counts {sorted(self.totals)}"
            )
        share = sums.loss(self.totals)
        self._parts.add("loss", MetricSum(share, reduction="sum"))
        for name, metric in sums.metrics.items():
            self._parts.add(name, metric)
        return share if share.requires_grad or not torch.is_grad_enabled() else share + idle(reads)

    def metrics(self) -> dict[str, Metric]:
        """This rank's parts: `loss`, `num_tokens` (all tokens of the rows) and the metrics of the implementation."""
        parts = {"loss": Metric(0.0, reduction="sum"), **self._parts.collect(self._local_totals)}
        parts["loss"] = replace(parts["loss"], over_updates="mean")
        num_tokens = Metric(float(self.columns.ragged(TOKENS).offsets[-1]), reduction="sum")
        return {**parts, "num_tokens": num_tokens}


def idle(reads: Mapping[str, Tensor]) -> Tensor:
    """A zero that still sends (zero) gradients to all parameters, for a rank that has no rows while others
    have."""
    return torch.stack([read.float().mean() * 0.0 for read in reads.values() if read.requires_grad]).sum()


def _summed(totals: Mapping[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    values = torch.tensor(list(totals.values()), dtype=torch.float64)
    if len(values):
        dist.all_reduce(values, group=group)
    return dict(zip(totals, values.tolist(), strict=True))


@dataclass
class _MetricParts:
    """Sums over microbatches, left on the device until they are collected."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)
    total_of: dict[str, str] = field(default_factory=dict)
    reductions: dict[str, Reduction] = field(default_factory=dict)

    def add(self, name: str, part: MetricSum) -> None:
        if part.reduction == "mean" and part.denominator is None:
            raise ValueError(f"metric {name!r} is a mean and needs a denominator: the name of a total, or a scalar")
        self.reductions[name] = part.reduction
        self.values.setdefault(name, []).append(part.value.detach())
        if isinstance(part.denominator, str):
            self.total_of[name] = part.denominator
        elif part.denominator is not None:
            self.weights.setdefault(name, []).append(part.denominator.detach())

    def collect(self, totals: Mapping[str, float]) -> dict[str, Metric]:
        """Metrics of all parts, which the host reads at one time."""
        sums = {(name, "value"): self._reduced(name, reduction) for name, reduction in self.reductions.items()}
        sums |= {(name, "weight"): _total(weights) for name, weights in self.weights.items()}
        read = _read(sums)

        def metric(name: str, reduction: Reduction) -> Metric:
            if reduction != "mean":
                return Metric(read[name, "value"], reduction=reduction)
            weight = totals[self.total_of[name]] if name in self.total_of else read[name, "weight"]
            return Metric(read[name, "value"], weight, reduction)

        return {name: metric(name, reduction) for name, reduction in self.reductions.items()}

    def _reduced(self, name: str, reduction: Reduction) -> Tensor:
        values = torch.stack([value.double() for value in self.values[name]])
        if reduction == "max":
            return values.max()
        return values.min() if reduction == "min" else values.sum()


def _total(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in values]).sum()


def _read(scalars: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], float]:
    """The values of scalars, with one wait for each device that they are on."""
    by_device: dict[torch.device, list[tuple[str, str]]] = {}
    for key, scalar in scalars.items():
        by_device.setdefault(scalar.device, []).append(key)
    found: dict[tuple[str, str], float] = {}
    for keys in by_device.values():
        found.update(zip(keys, torch.stack([scalars[key] for key in keys]).tolist(), strict=True))
    return found
