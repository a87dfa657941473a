"""Forward passes and the optimizer step over this rank's microbatches, through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rl_core.batch import TOKENS, Batch
from rl_core.metrics import Metric
from rl_core.microbatch import PAIR, Batching
from rl_core.model import Loss, Read
from rl_core.torch.loss import Rows
from rl_core.torch.rows import idle_rows, to_rows
from rl_core.torch.training.skipped_steps import SkippedSteps
from rl_core.torch.training.step import LossPass, idle, in_row_order, plan_together
from rl_megatron.balance import balance_metrics
from rl_megatron.model import ReadingModel
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.sharded_optimizer import ShardedOptimizer

Microbatch = tuple[Rows, bool]
"""Rows on the device, and whether they are the rank's own rather than company for other ranks."""

OnLastStage = Callable[[Microbatch, Mapping[str, Tensor]], Any]
"""From the reads of a microbatch to what its pass returns."""


def run_reads(
    model: ReadingModel, batch: Batch, reads: Sequence[Read], *, temperature: float, batching: Batching, mesh: Mesh
) -> Batch | None:
    """Columns of the reads for this rank's rows, in their order, on ranks that lead their shard; collective."""
    routing = {} if model.replay is None else model.replay.columns_of(batch)
    batch = batch.only([name for name in batch if name in (TOKENS, PAIR)]).local()
    plan = plan_pipelined(batch, batching, mesh)
    tokens = batch.only([TOKENS])

    def collect(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> dict[str, np.ndarray] | None:
        return {name: column.cpu().numpy() for name, column in columns.items()} if microbatch[1] else None

    model.train(False)
    with torch.no_grad():
        results = _pass(model, _on_device(tokens.with_columns(routing), plan, mesh), reads, temperature, collect)
    if not mesh.coordinates.leads:
        return None
    parts = [part for part in results if part is not None]
    return in_row_order(reads, parts, tokens, plan)


def run_evaluation(
    model: ReadingModel, batch: Batch, loss: Loss, *, batching: Batching, mesh: Mesh
) -> dict[str, Metric]:
    """This rank's metrics of the loss without a step, where it leads its shard; collective."""
    loss_pass = LossPass(loss, batch, mesh.data)
    columns = loss_pass.columns
    if model.replay is not None:
        columns = columns.with_columns(model.replay.columns_of(batch))
    plan = plan_pipelined(columns, batching, mesh)

    def measure(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> None:
        if microbatch[1]:
            loss_pass.microbatch(microbatch[0], columns)

    model.train(False)
    with torch.no_grad():
        _pass(model, _on_device(columns, plan, mesh), loss.reads, loss.temperature, measure)
    return loss_pass.metrics() if mesh.coordinates.leads else {}


def run_train_step(
    model: ReadingModel,
    chunks: list[DistributedDataParallel],
    batch: Batch,
    loss: Loss,
    *,
    optimizer: ShardedOptimizer,
    schedule: LRScheduler | None,
    max_grad_norm: float | None,
    skipped: SkippedSteps,
    batching: Batching,
    mesh: Mesh,
    reports_layers: bool,
) -> dict[str, Metric]:
    """Gradients over all microbatches, then one optimizer and schedule step; collective.

    The optimizer step is skipped if the gradient is not finite; the schedule advances nonetheless.

    Args:
        chunks: the model's, wrapped to reduce gradients.
        reports_layers: whether a loss that balances experts is reported for each layer too.

    Raises:
        RLError: if more steps in a row were skipped than `skipped` allows; nothing is stepped then.
    """
    loss_pass = LossPass(loss, batch, mesh.data)
    columns = loss_pass.columns
    if model.replay is not None:
        columns = columns.with_columns(model.replay.columns_of(batch))
    plan = plan_pipelined(columns, batching, mesh)
    microbatches = _on_device(columns, plan, mesh)

    def share(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> Tensor:
        return loss_pass.microbatch(microbatch[0], columns) if microbatch[1] else idle(columns)

    model.train(True)
    optimizer.zero_grad()
    num_tokens = sum(int(rows.offsets[-1]) for rows, is_own in microbatches if is_own)
    scale = _auxiliary_scale(model, num_tokens, mesh)
    _pass(model, microbatches, loss.reads, loss.temperature, share, chunks=chunks, scale=scale)
    biases = [] if model.routing is None else model.routing.biases()
    finalize_model_grads(chunks)
    grad_norm = optimizer.grad_norm()
    lr = optimizer.inner.param_groups[0]["lr"]
    steps = skipped.admits(grad_norm)
    if steps:
        if max_grad_norm is not None:
            optimizer.clip(grad_norm, max_grad_norm)
        optimizer.step()
    elif model.routing is not None:
        model.routing.restore(biases)
    if schedule is not None:
        schedule.step()
    balance = {}
    if model.routing is not None:
        balance = balance_metrics(model.routing, model.config, num_tokens, by_layer=reports_layers)
    if not mesh.coordinates.leads:
        return {}
    return {
        **loss_pass.metrics(),
        **balance,
        "grad_norm": Metric(grad_norm, reduction="max"),
        "lr": Metric(float(lr), reduction="max"),
        "skipped_steps": Metric(float(not steps), reduction="max"),
    }


def plan_pipelined(batch: Batch, batching: Batching, mesh: Mesh) -> list[np.ndarray]:
    """Microbatches of this rank's shard, as many as on every other rank, and as interleaved schedules want them."""
    multiple = 1
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        multiple = parallel_state.get_pipeline_model_parallel_world_size()
    return plan_together(batch, batching, mesh.control, multiple=multiple)


def _on_device(batch: Batch, plan: Sequence[np.ndarray], mesh: Mesh) -> list[Microbatch]:
    return [
        (to_rows(batch.select(rows), mesh.device), True) if len(rows) else (idle_rows(mesh.device), False)
        for rows in plan
    ]


def _pass(
    model: ReadingModel,
    microbatches: list[Microbatch],
    reads: Sequence[Read],
    temperature: float,
    on_last_stage: OnLastStage,
    *,
    chunks: list[DistributedDataParallel] | None = None,
    scale: float = 1.0,
) -> list[Any]:
    """Run all microbatches through all pipeline ranks; what `on_last_stage` returned for each, on the last one.

    Args:
        chunks: to run backwards too; `on_last_stage` then returns a share of the loss.
        scale: divides gradients of losses that Megatron adds on its own.
    """

    def forward(iterator: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(iterator)
        layout = model.lay_out(microbatch[0])
        plain = chunk if chunks is None else chunk.module
        if model.routing is not None and chunks is not None:
            model.routing.give(plain, microbatch[0], layout, is_own=microbatch[1])
        if model.replay is not None:
            model.replay.give(plain, microbatch[0], layout)
        output = chunk(layout.input_ids, layout.position_ids, None, packed_seq_params=layout.packing)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            columns = model.reads(hidden, layout, microbatch[0], reads, temperature)
            result = on_last_stage(microbatch, columns)
            if chunks is None:
                return result
            return result * scale, torch.zeros((), dtype=torch.int, device=hidden.device), result.detach()

        return output, finish

    model.config.grad_scale_func = partial(_divided, by=scale) if chunks is not None and scale != 1.0 else None
    running: Sequence[Any] = model.chunks if chunks is None else chunks
    if model.routing is not None:
        model.routing.start(trains=chunks is not None)
    if model.replay is not None:
        model.replay.start(trains=chunks is not None)
    iterators = [iter(microbatches) for _ in running]
    if not microbatches:
        return []
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(running) > 1 else iterators[0],
        model=list(running) if len(running) > 1 else running[0],
        num_microbatches=len(microbatches),
        seq_length=model.alignment.total,  # shapes travel with the tensors
        micro_batch_size=1,
        forward_only=chunks is None,
        collect_non_loss_data=chunks is None,
    )
    return results


def _divided(loss: Tensor, *, by: float) -> Tensor:
    return loss / by


def _auxiliary_scale(model: ReadingModel, num_tokens: int, mesh: Mesh) -> float:
    """The tokens of all ranks' rows, which divide a balancing loss that routers weigh by those of each microbatch; 1 if
    they add none."""
    if model.config.num_moe_experts is None or model.config.moe_router_load_balancing_type == "none":
        return 1.0
    total = torch.tensor(num_tokens)
    dist.all_reduce(total, group=mesh.data)
    return float(max(int(total), 1))
