"""Forward passes, losses and the optimizer step over this rank's microbatches, the same on every backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import PAIR, PREFIX_GROUP, Batching, Pipeline
from rl_core.data.ragged import Ragged
from rl_core.errors import RLError
from rl_core.images import IMAGES
from rl_core.metrics import Metric
from rl_core.model import ADAPTER, DIVERGENCES, UNDIVIDED, AdapterLosses, Loss, Read, StepSettings, read_columns
from rl_core.plugins import resolve
from rl_core.torch.heads.reads import ROW_READS
from rl_core.torch.loss import LossSums, MetricSum, Rows
from rl_core.torch.optim.optimizer import stepped_by
from rl_core.torch.rows import idle_rows, to_rows
from rl_core.torch.training.backend import (
    Microbatch,
    Microbatches,
    OnReads,
    Pass,
    RankAdapters,
    RankMesh,
    RankModel,
    RankOptimizer,
)
from rl_core.user_code import implementation_name

_log = logging.getLogger(__name__)

NO_PIPELINE = Pipeline()

AS_CONFIGURED = StepSettings()

SHARED_TOKENS = "shared_tokens"
"""Metric of a model that computes shared prefixes once: the share of the rows' tokens that it did not compute."""

_OF_OTHER_PASSES = frozenset({"prev_logprobs", "ref_logprobs", "generation_logprobs", "advantages"})
"""Columns of losses that compare the pass with logprobs of another one, of trainer, reference or generator."""


def run_reads(
    model: RankModel, batch: Batch, reads: Sequence[Read], *, temperature: float, batching: Batching, mesh: RankMesh
) -> Batch | None:
    """Return the columns of the reads for this rank's rows, in order, on ranks that lead their shard; collective."""
    extra = model.extra_columns(batch, for_loss=False)
    id_columns = read_columns(reads)
    batch.require(*id_columns)
    known = (TOKENS, PAIR, PREFIX_GROUP, IMAGES, ADAPTER, *id_columns)
    batch = batch.only([name for name in batch if name in known]).local()
    plan = plan_together(batch.with_columns(extra), batching, mesh.control, pipeline=model.pipeline, inputs=extra)
    inputs = batch.only([name for name in (TOKENS, PREFIX_GROUP, IMAGES, ADAPTER, *id_columns) if name in batch])

    def collect(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        if not microbatch.is_own:
            return None
        return {name: _to_host(column) for name, column in columns.items()}

    microbatches = _on_device(inputs.with_columns(extra), plan, id_columns, model, mesh)
    results = model.read(Pass(microbatches, reads, temperature, collect, _num_tokens(inputs)))
    mesh.kind.synchronize()
    if not mesh.coordinates.leads:
        return None
    size = model.hf_config.get_text_config().hidden_size
    parts = [{name: column.numpy() for name, column in part.items()} for part in results if part is not None]
    return in_row_order(reads, parts, inputs, plan, hidden_size=size)


def run_evaluation(
    model: RankModel, batch: Batch, loss: Loss, *, batching: Batching, mesh: RankMesh
) -> dict[str, Metric]:
    """Return this rank's metrics of the loss without a step, if it leads its shard; collective."""
    loss_pass = LossPass(loss, batch, mesh.data)

    def measure(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> None:
        if microbatch.is_own:
            loss_pass.microbatch(microbatch.rows, columns)

    model.read(_pass(model, loss_pass, batch, measure, batching=batching, mesh=mesh).run)
    return loss_pass.metrics() if mesh.coordinates.leads else {}


class TrainingSteps:
    """Gradients and optimizer steps of one rank's model, the same on every backend; every method is collective.

    The usage loop::

        for batch in batches:
            metrics, logprobs = steps.accumulate(batch, loss)
        metrics = steps.apply()

    With several adapters, `apply` and `discard` may be of one of them.

    Args:
        model: This rank's part of the model.
        optimizer: Steps this rank's part of the parameters.
        schedule: Of the learning rate; None for a constant one.
        max_grad_norm: Larger gradients are scaled down to this norm; None for no limit.
        skipped: Decides whether a gradient is stepped.
        batching: Microbatches of a pass.
        mesh: The ranks of the model.
        loss_scale: Factor of losses in float16; None for none.
        adapters: Several adapters on the model; None if it has one or none.
    """

    def __init__(
        self,
        model: RankModel,
        optimizer: RankOptimizer,
        *,
        schedule: LRScheduler | None,
        max_grad_norm: float | None,
        skipped: SkippedSteps,
        batching: Batching,
        mesh: RankMesh,
        loss_scale: LossScale | None = None,
        adapters: RankAdapters | None = None,
    ) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self._max_grad_norm, self._skipped, self._loss_scale = max_grad_norm, skipped, loss_scale
        self._batching, self._mesh, self._adapters = batching, mesh, adapters
        self._skipped_of: dict[int, SkippedSteps] = {}
        self._pending: set[int] = set()

    @property
    def is_pending(self) -> bool:
        """True if there is a gradient that has been neither applied nor discarded."""
        return bool(self._pending)

    def step(self, batch: Batch, loss: Loss) -> dict[str, Metric]:
        """Compute the gradient of a batch, then make one optimizer step; return the metrics of both.

        Raises:
            RLError: As `apply`.
        """
        return {**self._accumulate(batch, loss)[0], **self.apply()}

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[dict[str, Metric], Batch | None]:
        """Add the gradient of a batch, whose loss is divided by its own totals, to the gradient so far, which stays as
        it was if this fails.

        Returns:
            This rank's part of the metrics, and the columns of the loss's reads for its rows, in their order, on ranks
            that lead their shard.
        """
        metrics, run, parts = self._accumulate(batch, loss, keeps_reads=True)
        self._mesh.kind.synchronize()
        if not self._mesh.coordinates.leads:
            return {}, None
        found = [{name: column.numpy() for name, column in part.items()} for part in parts]
        size = self._model.hf_config.get_text_config().hidden_size
        return metrics, in_row_order(loss.reads, found, run.batch, run.plan, hidden_size=size)

    def apply(self, settings: StepSettings = AS_CONFIGURED, adapter: int | None = None) -> dict[str, Metric]:
        """Make one optimizer and schedule step with the gradient so far, and begin a new gradient.

        The optimizer step is skipped if the gradient is not finite; the schedule advances nonetheless. With a loss
        scale that can fall, such a step is an overflow, which does not count as skipped.

        Args:
            settings: Values that hold for this step only.
            adapter: Place of the adapter that steps alone; None for all parameters. The schedule counts only steps of
                all of them.

        Raises:
            ValueError: If there is no gradient, or the optimizer does not have one of the settings.
            RLError: If more steps in a row were skipped than the config allows; nothing is stepped then.
        """
        if not (self._pending if adapter is None else adapter in self._pending):
            raise ValueError("there is no gradient to step with; call accumulate first")
        if adapter is None:
            skipped, schedule = self._skipped, self._schedule
        else:
            skipped, schedule = self._skipped_of.setdefault(adapter, copy(self._skipped)), None
        with self._only(adapter):
            return self._apply(settings, skipped, schedule)

    def _apply(self, settings: StepSettings, skipped: SkippedSteps, schedule: LRScheduler | None) -> dict[str, Metric]:
        optimizer, limit = self._optimizer, settings.max_grad_norm or self._max_grad_norm
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        try:
            with stepped_by(settings, optimizer.inner) as lr:
                norm = optimizer.grad_norm() / scale
                overflows = self._loss_scale is not None and self._loss_scale.overflows(norm)
                steps = not overflows and skipped.admits(norm)
                if steps:
                    factor = 1 / scale
                    # `torch.nn.utils.clip_grad_norm_` has the same factor.
                    if limit is not None and (clip := limit / (norm + 1e-6)) < 1.0:
                        factor *= clip
                    if factor != 1:
                        optimizer.scale_grads(factor)
                    optimizer.step()
                else:
                    self._model.discard()
        finally:
            self._optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        if not self._mesh.coordinates.leads:
            return {}
        metrics: dict[str, Metric] = {}
        if self._loss_scale is not None:
            metrics["loss_scale"] = Metric(scale, reduction="max", over_updates="last")
            metrics["overflows"] = Metric(float(overflows), reduction="max", over_updates="sum")
        return {
            **metrics,
            "grad_norm": Metric(norm, reduction="max", over_updates="mean"),
            "lr": Metric(lr, reduction="max", over_updates="last"),
            "skipped_steps": Metric(float(not steps), reduction="max", over_updates="sum"),
        }

    def discard(self, adapter: int | None = None) -> None:
        """Begin a new gradient, of all parameters or of one adapter; the one so far is not stepped."""
        if self._pending if adapter is None else adapter in self._pending:
            with self._only(adapter):
                self._model.discard()
                self._optimizer.zero_grad()

    @contextmanager
    def _only(self, adapter: int | None) -> Iterator[None]:
        """Enter a context in which the optimizer has all parameters, or those of one adapter, and whose gradient is
        gone at its end."""
        assert adapter is None or self._adapters is not None, "a gradient of one of several adapters"
        stepping = nullcontext() if adapter is None or self._adapters is None else self._adapters.stepping(adapter)
        try:
            with stepping:
                yield
        finally:
            self._pending -= self._pending if adapter is None else {adapter}

    def _accumulate(
        self, batch: Batch, loss: Loss, *, keeps_reads: bool = False
    ) -> tuple[dict[str, Metric], _PlannedPass, list[dict[str, Tensor]]]:
        """Return this rank's part of the metrics, the pass, and the kept columns of its microbatches."""
        loss_pass = LossPass(loss, batch, self._mesh.data)
        parts: list[dict[str, Tensor]] = []
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value

        def share(microbatch: Microbatch, columns: Mapping[str, Tensor]) -> Tensor:
            own = loss_pass.microbatch(microbatch.rows, columns) if microbatch.is_own else idle(columns)
            if keeps_reads and microbatch.is_own:
                parts.append({name: _to_host(column.detach()) for name, column in columns.items()})
            return own if scale == 1 else own * scale

        # Collectives of a pass are over its own gradient alone.
        earlier = self._optimizer.take_grads() if self.is_pending else None
        try:
            planned = _pass(self._model, loss_pass, batch, share, batching=self._batching, mesh=self._mesh)
            run = replace(planned.run, adds=self.is_pending, loss_scale=scale)
            own = self._model.accumulate(run)
        except BaseException:
            self._optimizer.zero_grad()
            if earlier is not None:
                self._optimizer.add_grads(earlier)
            raise
        if earlier is not None:
            self._optimizer.add_grads(earlier)
        self._pending |= loss.losses.keys() if isinstance(loss, AdapterLosses) else {0}
        if not self._mesh.coordinates.leads:
            return {}, planned, []
        metrics = {**loss_pass.metrics(), **own}
        num_microbatches, batching = len(run.microbatches), self._batching
        if batching.packed and batching.max_tokens is not None:
            num_shared = own[SHARED_TOKENS].value if SHARED_TOKENS in own else 0.0
            filled = run.num_tokens - num_shared
            metrics["packing_efficiency"] = Metric(filled, num_microbatches * batching.max_tokens)
        if self._model.pipeline.size > 1:
            bubble = self._model.pipeline.bubble(num_microbatches)
            metrics["pipeline_bubble"] = Metric(bubble, reduction="max", over_updates="mean")
        return metrics, planned, parts


def plan_together(
    batch: Batch,
    batching: Batching,
    group: dist.ProcessGroup | None,
    *,
    pipeline: Pipeline = NO_PIPELINE,
    inputs: Iterable[str] = (),
) -> list[np.ndarray]:
    """Plan the microbatches of this rank's shard, as many as on every other rank of the group (some may be empty).

    In a pipeline there are more of them than the budget demands, with about the same number of tokens in each, so that
    its ranks wait less for one another, unless all are padded to one length.

    Args:
        batch: This rank's shard.
        batching: Layout of the rows, and the budget of a microbatch.
        group: On a backend that reduces CPU tensors.
        pipeline: The pipeline that they pass.
        inputs: Columns that hidden states follow from, in addition to the tokens.
    """
    units = batching.units(batch, inputs)
    num_tokens = _num_tokens(batch) if units is None else sum(unit.tokens for unit in units)
    wanted = 0 if batching.is_fixed else pipeline.wanted(batching.num_units(batch, units), num_tokens)
    count = torch.tensor(max(len(batching.plan(batch, units=units)), wanted if len(batch) else 0))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    is_even = pipeline.size > 1 and not batching.is_fixed
    return batching.plan(batch, min_count=pipeline.rounded(int(count)), even=is_even, units=units)


def in_row_order(
    reads: Sequence[Read],
    parts: Sequence[Mapping[str, np.ndarray]],
    batch: Batch,
    plan: Sequence[np.ndarray],
    *,
    hidden_size: int,
) -> Batch:
    """Join the columns of the reads from the microbatches, in the order of the batch's rows.

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
        if read.name == "hidden":
            inner: tuple[int, ...] = (max(hidden_size, read.width),)
        elif read.name == "divergences":
            inner = (len(DIVERGENCES),)
        elif read.column:
            inner = batch.ragged(read.column).values.shape[1:]
        else:
            inner = (read.k,) if read.name == "topk" else ()
        for name in read.columns:
            empty = np.zeros((0, *inner), dtype=np.int32 if name == "topk_ids" else np.float32)
            values = np.concatenate([empty, *(part[name] for part in parts)]).astype(empty.dtype)
            columns[name] = values[back] if read.name in ROW_READS else Ragged(values, offsets).select(back)
    return Batch(columns)


class _PlannedPass(NamedTuple):
    """A pass of a loss, with its rows and those of each of its microbatches."""

    run: Pass
    batch: Batch
    plan: list[np.ndarray]


def _pass(
    model: RankModel, loss_pass: LossPass, batch: Batch, on_reads: OnReads, *, batching: Batching, mesh: RankMesh
) -> _PlannedPass:
    """Return the pass of a loss, whose rows also have the columns that the model itself needs; collective."""
    extra = model.extra_columns(batch, for_loss=True)
    columns = loss_pass.columns.with_columns(extra)
    plan = plan_together(columns, batching, mesh.control, pipeline=model.pipeline, inputs=extra)
    if ADAPTER in columns:
        # Rows of one adapter lie together, so that its products are of one part of the tokens.
        places = columns.array(ADAPTER)
        plan = [rows[np.argsort(places[rows], kind="stable")] for rows in plan]
    loss = loss_pass.loss
    microbatches = _on_device(columns, plan, read_columns(loss.reads), model, mesh)
    compares = not _OF_OTHER_PASSES.isdisjoint(loss.columns)
    run = Pass(microbatches, loss.reads, loss.temperature, on_reads, _num_tokens(columns), compares)
    return _PlannedPass(run, columns, plan)


def _to_host(column: Tensor) -> Tensor:
    # Small columns are on the host once the device is synchronised. A large one is waited for here, because a copy that
    # does not wait takes pinned memory.
    return column.to("cpu", non_blocking=column.dim() == 1)


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


def prepared_ahead(makers: Sequence[Callable[[], Microbatch]], device: torch.device) -> Microbatches:
    """Return the same microbatches, with the next one made and copied on its own stream when one is taken.

    On a device without streams nothing is made before it is taken.

    Args:
        makers: Make the microbatches, in the order of the pass.
        device: Device that they are copied to.
    """
    if device.type != "cuda":
        return makers
    stream = torch.cuda.Stream(device)
    ready: dict[int, tuple[Microbatch, torch.cuda.Event]] = {}

    def take(index: int) -> Microbatch:
        for wanted in (index, index + 1):
            if wanted < len(makers) and wanted not in ready:
                with torch.cuda.stream(stream):
                    ready[wanted] = makers[wanted](), stream.record_event()
        microbatch, is_there = ready.pop(index)
        current = torch.cuda.current_stream(stream.device)
        current.wait_event(is_there)
        for tensor in (microbatch.rows.offsets, *microbatch.rows.columns.values()):
            # The tensor's memory is reused only after the work that this stream has been given until it is freed.
            tensor.record_stream(current)
        return microbatch

    return [partial(take, index) for index in range(len(makers))]


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
        ValueError: If the batch lacks a column of the loss or of one of its reads.
    """

    def __init__(self, loss: Loss, batch: Batch, group: dist.ProcessGroup | None) -> None:
        self.loss = loss
        named = (*loss.columns, *read_columns(loss.reads))
        batch.require(TOKENS, *named)
        self.columns = batch.only([name for name in batch if name in {TOKENS, PAIR, IMAGES, *named}]).local()
        self._compute: Callable[[Loss, Mapping[str, Tensor], Rows], LossSums] = resolve(
            implementation_name(loss, loss.implementation)
        )
        self._local_totals = {name: float(total) for name, total in loss.totals(self.columns).items()}
        summed = torch.tensor(list(self._local_totals.values()), dtype=torch.float64)
        if len(summed):
            dist.all_reduce(summed, group=group)
        self.totals: dict[str, float] = dict(zip(self._local_totals, summed.tolist(), strict=True))
        # Parts of each metric stay on the device until `metrics` reads the sums of all of them at one time.
        self._parts: dict[str, list[MetricSum]] = {}

    def microbatch(self, rows: Rows, reads: Mapping[str, Tensor]) -> Tensor:
        """Return this microbatch's share of the loss, a scalar with gradients.

        Over all microbatches and ranks the shares add up to the loss.
        """
        sums = self._sums(rows, reads)
        unknown = sorted(set(sums.objective) - set(self.totals) - {UNDIVIDED})
        if unknown:
            raise ValueError(
                f"{self.loss.implementation} returned sums over {unknown}, but Loss.totals counts {sorted(self.totals)}"
            )
        share = sums.loss(self.totals)
        for name, part in [("loss", MetricSum(share, reduction="sum")), *sums.metrics.items()]:
            if part.reduction == "mean" and part.denominator is None:
                raise ValueError(f"metric {name!r} is a mean and needs a denominator: the name of a total, or a scalar")
            weight = part.denominator.detach() if isinstance(part.denominator, Tensor) else part.denominator
            self._parts.setdefault(name, []).append(MetricSum(part.value.detach(), weight, part.reduction))
        return share if share.requires_grad or not torch.is_grad_enabled() else share + idle(reads)

    def _sums(self, rows: Rows, reads: Mapping[str, Tensor]) -> LossSums:
        try:
            return self._compute(self.loss, reads, rows)
        except RuntimeError as error:
            by_row = [name for name in self.loss.columns if isinstance(self.columns.columns[name], np.ndarray)]
            if not by_row or "size of tensor" not in str(error):
                raise
            raise ValueError(
                f"{self.loss.implementation}: {error}. {' and '.join(by_row)} {'has' if len(by_row) == 1 else 'have'} "
                f"a value per row; rows.per_token({by_row[0]!r}) has it at each token of the row"
            ) from error

    def metrics(self) -> dict[str, Metric]:
        """Return this rank's parts: `loss`, `num_tokens` (all tokens of the rows) and the implementation's metrics."""
        scalars: dict[tuple[str, str], Tensor] = {}
        for name, parts in self._parts.items():
            values = torch.stack([part.value.double() for part in parts])
            reduction = parts[-1].reduction
            scalars[name, "value"] = (
                values.max() if reduction == "max" else values.min() if reduction == "min" else values.sum()
            )
            if weights := [part.denominator.double() for part in parts if isinstance(part.denominator, Tensor)]:
                scalars[name, "weight"] = torch.stack(weights).sum()
        # The host waits once for each device that the scalars are on.
        read: dict[tuple[str, str], float] = {}
        for device in dict.fromkeys(scalar.device for scalar in scalars.values()):
            keys = [key for key, scalar in scalars.items() if scalar.device == device]
            read.update(zip(keys, torch.stack([scalars[key] for key in keys]).tolist(), strict=True))
        metrics = {"loss": Metric(0.0, reduction="sum")}
        for name, (*_, last) in self._parts.items():
            weight = 1.0
            if last.reduction == "mean":
                total = last.denominator
                weight = self._local_totals[total] if isinstance(total, str) else read[name, "weight"]
            metrics[name] = Metric(read[name, "value"], weight, last.reduction)
        metrics["loss"] = replace(metrics["loss"], over_updates="mean")
        return {**metrics, "num_tokens": Metric(float(_num_tokens(self.columns)), reduction="sum")}


def idle(reads: Mapping[str, Tensor]) -> Tensor:
    """Return a zero that sends zero gradients to all parameters, for a rank without rows while others have some."""
    return torch.stack([read.float().mean() * 0.0 for read in reads.values() if read.requires_grad]).sum()


class LossScale:
    """Factor of the loss in float16, so that small gradients do not become 0, by the rule of `torch.amp.GradScaler`.

    A gradient that is not finite halves it, and `GROWTH_INTERVAL` finite ones in a row double it. All ranks ask with
    the same global norm, so they have the same scale without a further collective.

    Attributes:
        value: The factor.
    """

    START = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self) -> None:
        self.value, self._num_finite = self.START, 0

    def overflows(self, grad_norm: float) -> bool:
        """Return whether the gradient overflowed, and adapt the factor for the next step. At a factor of 1 a gradient
        that is not finite is no overflow."""
        is_finite = math.isfinite(grad_norm)
        if not is_finite and self.value > 1:
            self.value, self._num_finite = self.value / 2, 0
            _log.warning("the gradient overflows float16; the optimizer step is skipped, loss scale %g", self.value)
            return True
        self._num_finite = self._num_finite + 1 if is_finite else 0
        if self._num_finite == self.GROWTH_INTERVAL:
            self.value, self._num_finite = self.value * 2, 0
        return False

    def state(self) -> dict[str, Any]:
        """Return the factor and the number of finite gradients since it changed."""
        return {"value": self.value, "num_finite": self._num_finite}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.value, self._num_finite = state["value"], state["num_finite"]


class SkippedSteps:
    """Decides whether the optimizer steps, and ends the run after too many steps in a row without a finite gradient.

    Every rank keeps its own count and asks with the same global norm, so all ranks decide alike without a further
    collective. The count is not part of a checkpoint: a resumed run starts at 0.

    The usage loop::

        steps = skipped.admits(norm)
        if steps:
            clip(norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()                               # also after a skipped step: it counts calls
        metrics = {"skipped_steps": Metric(float(not steps), reduction="max"), ...}

    Args:
        limit: Steps in a row that may be skipped (`ModelConfig.max_skipped_steps`).
        above: Gradient norm above which a step is skipped (`ModelConfig.skipped_grad_norm`); None skips only gradients
            that are not finite.
    """

    def __init__(self, limit: int, above: float | None = None) -> None:
        self._limit = limit
        self._most = math.inf if above is None else above
        self._in_a_row = 0

    def admits(self, grad_norm: float) -> bool:
        """Return whether to step with a gradient of this norm, the same on every rank.

        Raises:
            RLError: If it is not finite or too large, and so were the `limit` gradients before it.
        """
        if math.isfinite(grad_norm) and grad_norm <= self._most:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row > self._limit:
            raise RLError(
                f"the gradient norm is {grad_norm} in {self._in_a_row} training steps in a row; the weights were not "
                f"changed by them. max_skipped_steps={self._limit} in the model's config section allows {self._limit}. "
                "Lower the learning rate, or check the loss of the last steps"
            )
        _log.warning("the gradient norm is %s; the optimizer step is skipped (%d in a row)", grad_norm, self._in_a_row)
        return False
