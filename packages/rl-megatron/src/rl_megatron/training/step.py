"""Passes of a model over this rank's microbatches, through Megatron's pipeline schedules."""

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
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from rl_core.data.batch import Batch
from rl_core.data.pipeline import Pipeline
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric
from rl_core.torch.rows import no_images
from rl_core.torch.training.backend import Microbatch, Pass
from rl_core.torch.training.flops import ModelShape
from rl_megatron.model.model import ReadingModel, forget_embeddings, forget_tokens
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.training.balance import balance_metrics
from rl_megatron.training.weights import Weights


class MegatronModel:
    """The `rl_core.torch.training.backend.RankModel` of this rank's chunks.

    Args:
        reading: This rank's part of the model.
        chunks: The same, wrapped to reduce gradients; empty if it does not train.
        shape: Shape of the whole model; None if the operations of steps are not counted.
        reports_layers: True if a loss that balances experts is reported for each layer too.
    """

    def __init__(
        self,
        reading: ReadingModel,
        chunks: list[DistributedDataParallel],
        weights: Weights,
        mesh: Mesh,
        *,
        shape: ModelShape | None,
        reports_layers: bool,
    ) -> None:
        self.reading = reading
        self.shape = shape
        self._chunks = chunks
        self._weights = weights
        self._mesh = mesh
        self._reports_layers = reports_layers
        self._biases: list[Tensor] = []

    @property
    def pipeline(self) -> Pipeline:
        """Pipeline ranks, and the virtual stages of each."""
        return Pipeline(
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        )

    @property
    def hf_config(self) -> PreTrainedConfig:
        """Config of the whole model."""
        return self.reading.hf

    @property
    def architecture(self) -> str:
        """Name of the `transformers` class of this family and role.

        Raises:
            ValueError: If there is none.
        """
        kind = type(self.reading.hf)
        classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if self.reading.is_headless else MODEL_FOR_CAUSAL_LM_MAPPING
        if kind not in classes:
            raise ValueError(f"transformers has no sequence classifier for {self.reading.hf.model_type} models")
        found: Any = classes[kind]
        return str(found.__name__)

    def extra_columns(self, batch: Batch, *, for_loss: bool) -> Mapping[str, Ragged]:
        """The experts that tokens were sent to, if routing is replayed."""
        return {} if self.reading.replay is None else self.reading.replay.columns_of(batch, for_loss=for_loss)

    def image_columns(self, batch: Batch) -> Mapping[str, np.ndarray]:
        """Refuse images."""
        return no_images(batch)

    def read(self, run: Pass) -> list[Any]:
        """Forward through all stages."""
        self.reading.train(False)
        with torch.no_grad():
            return _run(self.reading, run)

    def accumulate(self, run: Pass) -> Mapping[str, Metric]:
        """Forward and backward through all stages; each rank is left with the gradients that it steps, and with metrics
        of the loss that balances experts."""
        model, routing = self.reading, self.reading.routing
        model.train(True, compares=run.compares)
        _run(model, run, chunks=self._chunks, scale=_auxiliary_scale(model, run.num_tokens, self._mesh))
        self._biases = [] if routing is None else routing.biases()
        finalize_model_grads(self._chunks)
        if routing is None:
            return {}
        return balance_metrics(routing, model.config, run.num_tokens, by_layer=self._reports_layers)

    def discard(self) -> None:
        """Put back the biases of routers, which follow the tokens of each pass."""
        if self.reading.routing is not None:
            self.reading.routing.restore(self._biases)

    def trained_parts(self) -> list[Tensor]:
        """This rank's parameters and buffers that steps change."""
        return list(self._weights.kept.values())

    def close(self) -> None:
        """Empty what Megatron keeps for its next pass, or beyond the model."""
        forget_tokens(self._chunks)
        forget_embeddings()


def _run(
    model: ReadingModel, run: Pass, *, chunks: list[DistributedDataParallel] | None = None, scale: float = 1.0
) -> list[Any]:
    """Pass all microbatches through all pipeline ranks; what `on_reads` returned for each, on the last one.

    Args:
        model: This rank's part of the model.
        run: Microbatches, and what to compute from each.
        chunks: Chunks to run backwards too.
        scale: Divides gradients of losses that Megatron adds on its own.
    """

    def forward(iterator: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(iterator)
        layout = model.lay_out(microbatch.rows)
        plain = chunk if chunks is None else chunk.module
        if model.routing is not None and chunks is not None:
            model.routing.give(plain, microbatch.rows, layout, is_own=microbatch.is_own)
        if model.replay is not None:
            model.replay.give(plain, microbatch.rows, layout)
        output = chunk(layout.input_ids, layout.position_ids, None, packed_seq_params=layout.packing)

        def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
            columns = model.reads(hidden, layout, microbatch.rows, run.reads, run.temperature)
            result = run.on_reads(microbatch, columns)
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
    if not run.microbatches:
        return []
    made = [make() for make in run.microbatches]
    iterators = [iter(made) for _ in running]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(running) > 1 else iterators[0],
        model=list(running) if len(running) > 1 else running[0],
        num_microbatches=len(run.microbatches),
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
