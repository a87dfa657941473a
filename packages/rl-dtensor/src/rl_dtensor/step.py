"""Forward passes and the optimizer step over this rank's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rl_core.batch import TOKENS, Batch
from rl_core.metrics import Metric
from rl_core.microbatch import PAIR, Batching
from rl_core.model import Loss, Read
from rl_core.torch.rows import idle_rows, to_rows
from rl_core.torch.training.skipped_steps import SkippedSteps
from rl_core.torch.training.step import LossPass, idle, in_row_order, plan_together
from rl_dtensor.gradients import clip, grad_norm, sum_tied
from rl_dtensor.model import ShardedModel
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.parallel.pipeline import Microbatch, run_pipeline


def run_reads(
    model: ShardedModel, batch: Batch, reads: Sequence[Read], *, temperature: float, batching: Batching, mesh: Mesh
) -> Batch | None:
    """Columns of the reads for this rank's rows, in their order, on ranks that lead their shard; collective."""
    batch = batch.only([name for name in batch if name in (TOKENS, PAIR)]).local()
    plan = plan_alike(model, batch, batching, mesh)
    tokens = batch.only([TOKENS])

    def collect(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> dict[str, np.ndarray] | None:
        return {name: column.cpu().numpy() for name, column in columns.items()} if microbatch[1] else None

    model.train(False)
    with torch.no_grad():
        made = _on_device(tokens, plan, mesh)
        results = run_pipeline(model, made, reads, temperature, collect, mesh=mesh, backward=False)
    model.reshard_all()
    if not mesh.coordinates.leads:
        return None
    parts = [results[index] for index in sorted(results) if results[index] is not None]
    return in_row_order(reads, parts, tokens, plan)


def run_evaluation(
    model: ShardedModel, batch: Batch, loss: Loss, *, batching: Batching, mesh: Mesh
) -> dict[str, Metric]:
    """This rank's metrics of the loss without a step, where it leads its shard; collective."""
    loss_pass = LossPass(loss, batch, mesh.group("dp"))
    made = _on_device(loss_pass.columns, plan_alike(model, loss_pass.columns, batching, mesh), mesh)

    def measure(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> None:
        if microbatch[1]:
            loss_pass.microbatch(microbatch[0], columns)

    model.train(False)
    with torch.no_grad():
        run_pipeline(model, made, loss.reads, loss.temperature, measure, mesh=mesh, backward=False)
    model.reshard_all()
    return loss_pass.metrics() if mesh.coordinates.leads else {}


def run_train_step(
    model: ShardedModel,
    batch: Batch,
    loss: Loss,
    *,
    optimizer: Optimizer,
    schedule: LRScheduler | None,
    max_grad_norm: float | None,
    skipped: SkippedSteps,
    batching: Batching,
    mesh: Mesh,
) -> dict[str, Metric]:
    """Gradients over all microbatches, then one optimizer and schedule step; collective.

    The optimizer step is skipped if the gradient is not finite; the schedule advances nonetheless.

    Raises:
        RLError: if more steps in a row were skipped than `skipped` allows; nothing is stepped then.
    """
    loss_pass = LossPass(loss, batch, mesh.group("dp"))
    made = _on_device(loss_pass.columns, plan_alike(model, loss_pass.columns, batching, mesh), mesh)

    def share(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> Tensor:
        part = loss_pass.microbatch(microbatch[0], columns) if microbatch[1] else idle(columns)
        return part * mesh.num_gradients  # FSDP averages over them

    model.train(True)
    run_pipeline(model, made, loss.reads, loss.temperature, share, mesh=mesh, backward=True)
    sum_tied(model, mesh)
    norm = grad_norm(model, mesh)
    lr = optimizer.param_groups[0]["lr"]
    try:
        steps = skipped.admits(norm)
        if steps and max_grad_norm is not None:
            clip(model, norm, max_grad_norm)
        if steps:
            optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)
    if schedule is not None:
        schedule.step()
    if not mesh.coordinates.leads:
        return {}
    return {
        **loss_pass.metrics(),
        "grad_norm": Metric(norm, reduction="max"),
        "lr": Metric(float(lr), reduction="max"),
        "skipped_steps": Metric(float(not steps), reduction="max"),
    }


def plan_alike(model: ShardedModel, batch: Batch, batching: Batching, mesh: Mesh) -> list[np.ndarray]:
    """Microbatches of this rank's shard, as many as on every other rank, and as interleaved stages want them."""
    return plan_together(batch, batching, mesh.control, multiple=mesh.sizes.pp if len(model.chunks) > 1 else 1)


def _on_device(batch: Batch, plan: Sequence[np.ndarray], mesh: Mesh) -> list[Callable[[], Microbatch]]:
    def make(rows: np.ndarray) -> Microbatch:
        if not len(rows):
            return idle_rows(mesh.device), False
        return to_rows(batch.select(rows), mesh.device), True

    return [partial(make, rows) for rows in plan]
