"""Passes of a model over this rank's microbatches, through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedConfig

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.torch.rows import no_images
from rl_core.torch.training.backend import Microbatch, Pass
from rl_core.torch.training.flops import ModelShape
from rl_core.torch.training.memory import StepPlan
from rl_megatron.model.layout import sequence_length
from rl_megatron.model.model import ReadingModel, forget_embeddings, forget_tokens
from rl_megatron.model.recompute import put_into_effect
from rl_megatron.model.routing import Routing
from rl_megatron.parallel.mesh import MegatronMesh
from rl_megatron.training.weights import MegatronWeights

NAME = "load_balancing_loss"


class MegatronModel:
    """The `rl_core.torch.training.backend.RankModel` of this rank's chunks.

    Args:
        reading: This rank's part of the model.
        chunks: The same, wrapped to reduce gradients; empty if it does not train.
        shape: Shape of the whole model; None if the operations of steps are not counted.
        reports_layers: True if a loss that balances experts is reported for each layer too.

    Attributes:
        hf_config: Config of the whole model.
    """

    def __init__(
        self,
        reading: ReadingModel,
        chunks: list[DistributedDataParallel],
        weights: MegatronWeights,
        mesh: MegatronMesh,
        *,
        shape: ModelShape | None,
        reports_layers: bool,
    ) -> None:
        self.reading = reading
        self.hf_config: PreTrainedConfig = reading.hf if reading.vision is None else reading.vision.hf
        self.shape, self._chunks, self._weights = shape, chunks, weights
        self._mesh, self._reports_layers = mesh, reports_layers
        self._biases: list[Tensor] = []

    def plan_step(self, room: int) -> StepPlan:
        """Put the plan into effect that fits the memory; see `rl_core.torch.training.memory.planned_step`.

        Args:
            room: Bytes that a training step may take.
        """
        memory = self.reading.memory
        assert memory is not None, "a model that trains on a device with memory has counted it"
        recompute, plan = memory.plan(room)
        if memory.choice == "auto":
            put_into_effect(recompute, self.reading.chunks, self.reading.config)
        return plan

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline ranks, and the virtual stages of each."""
        num_virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return Pipeline(parallel_state.get_pipeline_model_parallel_world_size(), num_virtual)

    @property
    def architecture(self) -> str:
        """Name of the `transformers` class of this family and role.

        Raises:
            ValueError: If there is none.
        """
        if self.reading.vision is not None:
            return self.reading.vision.architecture
        kind = type(self.reading.hf)
        classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if self.reading.is_headless else MODEL_FOR_CAUSAL_LM_MAPPING
        if kind not in classes:
            raise ValueError(f"transformers has no sequence classifier for {self.reading.hf.model_type} models")
        found: Any = classes[kind]
        return str(found.__name__)

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """Return the experts that tokens were sent to, if routing is replayed."""
        return {} if self.reading.replay is None else self.reading.replay.columns_of(batch, for_loss=for_loss)

    def image_columns(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Return the columns of the images of rows; none for a language model, whose rows have no images."""
        vision = self.reading.vision
        return no_images(batch) if vision is None else vision.columns(batch)

    def read(self, run: Pass) -> list[Any]:
        """Pass forward through all stages."""
        self.reading.train(False)
        with torch.no_grad():
            return _run(self.reading, run)

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Pass forward and backward through all stages; each rank is left with the gradients that it steps, and with
        metrics of the loss that balances experts."""
        model, routing = self.reading, self.reading.routing
        model.train(True, compares=run.compares)
        # Routers weigh a balancing loss by the tokens of each microbatch; the tokens of all ranks' rows divide it.
        divisor = 1.0
        if routing is not None and model.config.moe_router_load_balancing_type != "none":
            total = torch.tensor(run.num_tokens)
            dist.all_reduce(total, group=self._mesh.data)
            divisor = float(max(int(total), 1))
        _run(model, run, chunks=self._chunks, divisor=divisor / run.loss_scale)
        if not run.adds:
            self._biases = [] if routing is None else routing.biases()
        finalize_model_grads(self._chunks)
        if routing is None:
            return {}
        return balance_metrics(routing, model.config, run.num_tokens, by_layer=self._reports_layers)

    def discard(self) -> None:
        """Put back the biases of routers, which follow the tokens of each pass, as they were before the first one."""
        if self.reading.routing is not None:
            self.reading.routing.restore(self._biases)

    def trained_parts(self) -> list[Tensor]:
        """Return this rank's parameters and buffers that steps change."""
        return list(self._weights.kept.values())

    def close(self) -> None:
        """Empty the tensors that Megatron keeps for its next pass, or beyond the model."""
        forget_tokens(self._chunks)
        forget_embeddings()


def _run(
    model: ReadingModel, run: Pass, *, chunks: list[DistributedDataParallel] | None = None, divisor: float = 1.0
) -> list[Any]:
    """Pass all microbatches through all pipeline ranks; on the last one, return the results of `on_reads` for each.

    Args:
        model: This rank's part of the model.
        run: Microbatches, and the reads to compute from each.
        chunks: Chunks to run backwards too.
        divisor: Divisor of the gradients of Megatron's own losses.
    """
    trains = chunks is not None

    def forward(
        iterator: Iterator[Microbatch], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        microbatch = next(iterator)
        layout = model.lay_out(microbatch.rows)
        plain = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        if model.routing is not None and trains:
            model.routing.give(plain, microbatch.rows, layout, is_own=microbatch.is_own)
        if model.replay is not None:
            model.replay.give(plain, microbatch.rows, layout)
        # A schedule that runs two microbatches at one time takes the parts of the pass, and hands over float32.
        pass_on = plain.build_schedule_plan if return_schedule_plan else chunk
        arguments = {"position_ids": layout.position_ids}
        if model.vision is not None:
            arguments = model.vision.arguments(plain, microbatch.rows, layout)
        output = pass_on(layout.input_ids, attention_mask=None, packed_seq_params=layout.packing, **arguments)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            hidden = hidden.to(model.config.params_dtype)
            columns = model.reads(hidden, layout, microbatch.rows, run.reads, run.temperature)
            result = run.on_reads(microbatch, columns)
            if not trains:
                return result
            return result * divisor, torch.zeros((), dtype=torch.int, device=hidden.device), result.detach()

        return output, finish

    model.config.grad_scale_func = (lambda loss: loss / divisor) if trains and divisor != 1.0 else None
    running: Sequence[Any] = model.chunks if chunks is None else chunks
    for routers in (model.routing, model.replay):
        if routers is not None:
            routers.start(trains=trains)
    if not run.microbatches:
        return []
    made = [make() for make in run.microbatches]
    # Stages tell one another the shape of each tensor and wait for their GPUs to read it, unless all have one length.
    lengths = {sequence_length(each.rows.host_offsets, model.alignment) for each in made} if model.is_packed else set()
    model.config.variable_seq_lengths = len(lengths) != 1
    iterators = [iter(made) for _ in running]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(running) > 1 else iterators[0],
        model=list(running) if len(running) > 1 else running[0],
        num_microbatches=len(run.microbatches),
        seq_length=max(lengths, default=0),
        micro_batch_size=1,
        forward_only=not trains,
        collect_non_loss_data=not trains,
    )
    return results


def balance_metrics(
    routing: Routing, config: TransformerConfig, num_tokens: int, *, by_layer: bool
) -> dict[str, Metric]:
    """Return `load_balancing_loss`, the mean over layers and tokens, 1 if tokens are spread evenly, before its
    coefficient; collective. Empty if there is no such loss.

    Args:
        routing: Routers of this rank, with the losses of the pass.
        config: Megatron's config of the whole model.
        num_tokens: Number of tokens of this rank's shard.
        by_layer: True to add `load_balancing_loss_layer_<n>` for each layer with experts.
    """
    if config.moe_router_load_balancing_type == "none":
        return {}
    # A pipeline rank has only its own layers, and a rank that shares a row's tokens only its part.
    values = torch.zeros(config.num_layers, device=torch.cuda.current_device())
    for router in routing.routers:
        if router.noted is not None:
            values[router.layer_number - 1] += router.noted
    dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(values, group=parallel_state.get_tensor_and_context_parallel_group())
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        layers = list(range(0, config.num_layers, pattern))
    else:
        layers = [number for number, has_experts in enumerate(pattern) if has_experts]
    weight = float(num_tokens)
    found = {NAME: Metric(float(values[layers].mean()), weight, "mean")}
    if by_layer:
        found |= {f"{NAME}_layer_{number}": Metric(float(values[number]), weight, "mean") for number in layers}
    return found
