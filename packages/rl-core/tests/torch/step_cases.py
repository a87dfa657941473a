"""A loss, and what ranks of a pool do with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from joined_rank import joined

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Batching, Pipeline
from rl_core.metrics import Metric
from rl_core.model import LOGPROBS
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.loss import LossSums, MetricSum, Rows
from rl_core.torch.rows import to_rows
from rl_core.torch.training.step import LossPass, plan_together


@dataclass(frozen=True)
class Squares:
    metric: str = "share"
    columns: ClassVar = ("targets",)
    reads: ClassVar = (LOGPROBS,)
    temperature: ClassVar = 1.0
    implementation: ClassVar = "step_cases:squares"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        return {"tokens": float(len(batch.ragged("tokens").values)), "rows": float(len(batch))}


def squares(loss: Squares, reads, rows: Rows) -> LossSums:
    errors = (reads["logprobs"] - rows["targets"]).square()
    sums = {
        "share": ({"tokens": errors.sum(), "rows": rows.row_sums(errors).sum()}, MetricSum(errors.sum(), "tokens")),
        "no denominator": ({"tokens": errors.sum()}, MetricSum(errors.sum())),
        "unknown total": ({"bananas": errors.sum()}, MetricSum(errors.sum(), "tokens")),
        "detached": ({"tokens": errors.detach().sum()}, MetricSum(errors.max(), reduction="max")),
    }
    objective, metric = sums[loss.metric]
    return LossSums(objective, {"squares": metric})


def run_pass(rank: Rank, batch: Batch, loss: Squares, max_tokens: int) -> tuple[dict[str, Metric], np.ndarray, int]:
    """Loss of reads `tokens * parameter`; metrics, the parameter's gradient, the number of microbatches."""
    with joined(rank):
        parameter = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        loss_pass = LossPass(loss, batch, None)
        batching = Batching(packed=True, max_tokens=max_tokens, max_rows=None)
        plan = plan_together(loss_pass.columns, batching, None)
        for index in plan:
            if len(index):
                rows = to_rows(loss_pass.columns.select(index), torch.device("cpu"))
                loss_pass.microbatch(rows, {"logprobs": rows["tokens"] * parameter}).backward()
        grad = np.zeros(()) if parameter.grad is None else parameter.grad.numpy()
        return loss_pass.metrics(), grad, len(plan)


def num_planned(rank: Rank, batch: Batch, batching: Batching, pipeline: Pipeline) -> int:
    """The number of microbatches for a pipeline."""
    with joined(rank):
        return len(plan_together(batch, batching, None, pipeline=pipeline))
