"""Forward passes and the optimizer step over this rank's microbatches, the same on every backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import PAIR, Batching
from rl_core.data.pipeline import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.images import IMAGES
from rl_core.metrics import Metric
from rl_core.model import DIVERGENCES, Loss, Read, read_columns
from rl_core.torch.heads.reads import ROW_READS
from rl_core.torch.rows import idle_rows, to_rows
from rl_core.torch.training.backend import (
    Microbatch,
    Microbatches,
    OnReads,
    Pass,
    RankMesh,
    RankModel,
    RankOptimizer,
)
from rl_core.torch.training.lookahead import prepared_ahead
from rl_core.torch.training.loss_pass import LossPass, idle
from rl_core.torch.training.skipped_steps import SkippedSteps

NO_PIPELINE = Pipeline()

_OF_OTHER_PASSES = frozenset({"prev_logprobs", "ref_logprobs", "generation_logprobs", "advantages"})
"""Columns of losses that compare the pass with logprobs of another one, of trainer, reference or generator."""


def run_reads(
    model: RankModel, batch: Batch, reads: Sequence[Read], *, temperature: float, batching: Batching, mesh: RankMesh
) -> Batch | None:
    """Columns of the reads for this rank's rows, in their order, on ranks that lead their shard; collective."""
    extra = model.extra_columns(batch, for_loss=False)
    id_columns = read_columns(reads)
    batch.require(*id_columns)
    batch = batch.only([name for name in batch if name in (TOKENS, PAIR, IMAGES, *id_columns)]).local()
    plan = plan_together(batch, batching, mesh.control, pipeline=model.pipeline)
    inputs = batch.only([name for name in (TOKENS, IMAGES, *id_columns) if name in batch])

    def collect(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        return {name: _on_the_way(column) for name, column in columns.items()} if microbatch.is_own else None

    microbatches = _on_device(inputs.with_columns(extra), plan, id_columns, model, mesh)
    results = model.read(Pass(microbatches, reads, temperature, collect, _num_tokens(inputs)))
    mesh.kind.synchronize()
    if not mesh.coordinates.leads:
        return None
    size = model.hf_config.get_text_config().hidden_size
    parts = [{name: column.numpy() for name, column in part.items()} for part in results if part is not None]
    return in_row_order(reads, parts, inputs, plan, hidden_size=size)


def _on_the_way(column: Tensor) -> Tensor:
    """A column on the host, once the device is synchronised; a large one already, as what does not wait is pinned."""
    return column.to("cpu", non_blocking=column.dim() == 1)


def run_evaluation(
    model: RankModel, batch: Batch, loss: Loss, *, batching: Batching, mesh: RankMesh
) -> dict[str, Metric]:
    """This rank's metrics of the loss without a step, if it leads its shard; collective."""
    loss_pass = LossPass(loss, batch, mesh.data)

    def measure(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> None:
        if microbatch.is_own:
            loss_pass.microbatch(microbatch.rows, columns)

    model.read(_pass(model, loss_pass, batch, measure, batching=batching, mesh=mesh))
    return loss_pass.metrics() if mesh.coordinates.leads else {}


def run_train_step(
    model: RankModel,
    optimizer: RankOptimizer,
    batch: Batch,
    loss: Loss,
    *,
    schedule: LRScheduler | None,
    max_grad_norm: float | None,
    skipped: SkippedSteps,
    batching: Batching,
    mesh: RankMesh,
) -> dict[str, Metric]:
    """Gradients over all microbatches, then one optimizer and schedule step; collective.

    The optimizer step is skipped if the gradient is not finite; the schedule advances nonetheless.

    Raises:
        RLError: If more steps in a row were skipped than `skipped` allows; nothing is stepped then.
    """
    loss_pass = LossPass(loss, batch, mesh.data)

    def share(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> Tensor:
        return loss_pass.microbatch(microbatch.rows, columns) if microbatch.is_own else idle(columns)

    lr = optimizer.inner.param_groups[0]["lr"]
    try:
        run = _pass(model, loss_pass, batch, share, batching=batching, mesh=mesh)
        own = model.accumulate(run)
        norm = optimizer.grad_norm()
        steps = skipped.admits(norm)
        if steps:
            _clip(optimizer, norm, max_grad_norm)
            optimizer.step()
        else:
            model.discard()
    finally:
        optimizer.zero_grad()
    if schedule is not None:
        schedule.step()
    if not mesh.coordinates.leads:
        return {}
    return {
        **loss_pass.metrics(),
        **own,
        **_packing(run, batching),
        **_waiting(run, model.pipeline),
        "grad_norm": Metric(norm, reduction="max", over_updates="mean"),
        "lr": Metric(float(lr), reduction="max", over_updates="last"),
        "skipped_steps": Metric(float(not steps), reduction="max", over_updates="sum"),
    }


def _packing(run: Pass, batching: Batching) -> dict[str, Metric]:
    """The share of the packed microbatches' token budget that this rank's rows fill; nothing if rows are padded."""
    if not batching.packed or batching.max_tokens is None:
        return {}
    return {"packing_efficiency": Metric(float(run.num_tokens), len(run.microbatches) * batching.max_tokens)}


def _waiting(run: Pass, pipeline: Pipeline) -> dict[str, Metric]:
    """The share of the step for which pipeline ranks wait, by the number of microbatches; nothing without a
    pipeline."""
    if pipeline.size == 1:
        return {}
    return {"pipeline_bubble": Metric(pipeline.bubble(len(run.microbatches)), reduction="max", over_updates="mean")}


def _clip(optimizer: RankOptimizer, norm: float, max_norm: float | None) -> None:
    """Scale a gradient of this norm down to `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    if max_norm is not None and (factor := max_norm / (norm + 1e-6)) < 1.0:
        optimizer.scale_grads(factor)


def plan_together(
    batch: Batch, batching: Batching, group: dist.ProcessGroup | None, *, pipeline: Pipeline = NO_PIPELINE
) -> list[np.ndarray]:
    """Microbatches of this rank's shard, as many as on every other rank of the group (some may be empty).

    In a pipeline there are more of them than the budget demands, with about the same number of tokens in each, so that
    its ranks wait less for one another, unless all are padded to one length.

    Args:
        batch: This rank's shard.
        batching: Layout of the rows, and the budget of a microbatch.
        group: On a backend that reduces CPU tensors.
        pipeline: The pipeline that they pass.
    """
    wanted = 0 if batching.is_fixed else pipeline.wanted(batching.num_units(batch), _num_tokens(batch))
    count = torch.tensor(max(len(batching.plan(batch)), wanted if len(batch) else 0))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    return batching.plan(
        batch, min_count=pipeline.rounded(int(count)), even=pipeline.size > 1 and not batching.is_fixed
    )


def in_row_order(
    reads: Sequence[Read],
    parts: Sequence[Mapping[str, np.ndarray]],
    batch: Batch,
    plan: Sequence[np.ndarray],
    *,
    hidden_size: int,
) -> Batch:
    """Columns of the reads, put together from those of microbatches, in the order of the batch's rows.

    Args:
        reads: Reads whose columns the parts hold.
        parts: Columns of each microbatch, in the order of the plan; empty microbatches left out.
        batch: Batch with the tokens of the rows, and the ids that reads take.
        plan: Rows of each microbatch.
        hidden_size: Hidden size of the model's hidden states.
    """
    order = np.concatenate([*plan, np.zeros(0, dtype=np.int64)]).astype(np.int64)
    back = np.argsort(order)
    offsets = batch.only([TOKENS]).select(order).ragged(TOKENS).offsets
    columns: dict[str, Ragged | np.ndarray] = {}
    for read in reads:
        for name in read.columns:
            empty = np.zeros(
                (0, *_inner_shape(read, batch, hidden_size)), dtype=np.int32 if name == "topk_ids" else np.float32
            )
            values = np.concatenate([empty, *(part[name] for part in parts)]).astype(empty.dtype)
            columns[name] = values[back] if read.name in ROW_READS else Ragged(values, offsets).select(back)
    return Batch(columns)


def _inner_shape(read: Read, batch: Batch, hidden_size: int) -> tuple[int, ...]:
    """Shape of the result of a read at one token, or of one row."""
    if read.name == "hidden":
        return (max(hidden_size, read.width),)
    if read.name == "divergences":
        return (len(DIVERGENCES),)
    if read.column:
        return batch.ragged(read.column).values.shape[1:]
    return (read.k,) if read.name == "topk" else ()


def _pass(
    model: RankModel, loss_pass: LossPass, batch: Batch, on_reads: OnReads, *, batching: Batching, mesh: RankMesh
) -> Pass:
    """The pass of a loss, whose rows also have the columns that the model itself needs; collective."""
    columns = loss_pass.columns.with_columns(model.extra_columns(batch, for_loss=True))
    plan = plan_together(columns, batching, mesh.control, pipeline=model.pipeline)
    loss = loss_pass.loss
    microbatches = _on_device(columns, plan, read_columns(loss.reads), model, mesh)
    compares = not _OF_OTHER_PASSES.isdisjoint(loss.columns)
    return Pass(microbatches, loss.reads, loss.temperature, on_reads, _num_tokens(columns), compares)


def _num_tokens(batch: Batch) -> int:
    return int(batch.ragged(TOKENS).offsets[-1])


def _on_device(
    batch: Batch, plan: Sequence[np.ndarray], id_columns: Sequence[str], model: RankModel, mesh: RankMesh
) -> Microbatches:
    def make(rows: np.ndarray) -> Microbatch:
        if not len(rows):
            return Microbatch(idle_rows(mesh.device, id_columns), is_own=False)
        return Microbatch(to_rows(batch.select(rows), mesh.device, images=model.image_columns), is_own=True)

    return prepared_ahead([partial(make, rows) for rows in plan], mesh.device)
