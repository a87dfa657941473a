"""One rank of a model on Megatron Core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from rl_core.data.microbatch import Batching
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.optim.optimizer import build_optimizer, with_fused_step
from rl_core.torch.optim.parameters import OptimizedParameter
from rl_core.torch.training.backend import TrainingParts
from rl_core.torch.training.flops import ModelShape, attention_shapes
from rl_core.torch.training.lora import InitialFactors
from rl_core.torch.training.worker import TrainingWorker
from rl_megatron import cpu_shim
from rl_megatron.config import MegatronConfig
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.model.build import build_model
from rl_megatron.model.layout import row_multiple
from rl_megatron.model.lora import add_adapters
from rl_megatron.model.model import EMBEDDING, ReadingModel
from rl_megatron.model.vision import PREFIX
from rl_megatron.parallel.mesh import MegatronMesh
from rl_megatron.training.residency import MegatronResidency
from rl_megatron.training.sharded_optimizer import MegatronOptimizer, wrap_chunks
from rl_megatron.training.state import MegatronState
from rl_megatron.training.step import MegatronModel
from rl_megatron.training.weights import SCORE, MegatronWeights


class MegatronWorker(TrainingWorker):
    """A `ModelWorker` whose layers are spread over tensor-, pipeline-, context- and expert-parallel ranks by Megatron
    Core, and whose optimizer state is spread over the data-parallel ranks.

    The constructor joins the process groups, builds this rank's part of the model and loads its slices of the Hugging
    Face files. One process holds one worker at a time: Megatron keeps its groups per process.

    Args:
        config: The model; the optimizer steps float32 copies whatever the compute dtype.
        backend: This backend's settings.
        spec: Its purpose. The reference are the weights at `config.model_name`, also after a `load`.
        rendezvous: How to find the other ranks.

    Raises:
        ValueError: If files, config, role and settings do not fit together.
    """

    def __init__(self, config: ModelConfig, backend: MegatronConfig, spec: ModelSpec, rendezvous: Rendezvous) -> None:
        if rendezvous.kind.kernels == "cpu":
            cpu_shim.install()
        elif backend.tensor_model_parallel_size > 1:
            # Kernels then begin in the order of their launch: a collective before the product that it is to overlap
            # with. CUDA reads it when this process first uses the GPU, which is when ranks join.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        mesh = MegatronMesh.join(rendezvous, backend)
        multiple = row_multiple(backend.context_parallel_size) if backend.pads_microbatches else None
        build = partial(build_parts, config, backend, spec, mesh)
        super().__init__(config, spec, mesh, build, row_multiple=multiple)


def build_parts(
    config: ModelConfig, backend: MegatronConfig, spec: ModelSpec, mesh: MegatronMesh, folder: Path
) -> TrainingParts:
    """Build and load this rank's part of a model; collective."""
    is_packed = Batching.of(config, training=True).packed
    model = build_model(config, backend, spec, folder=folder, is_packed=is_packed, mesh=mesh)
    if config.lora_cfg.enabled:
        add_adapters(model, config.lora_cfg)
    weights = MegatronWeights(model, WeightFiles.of(folder, is_whole=model.vision is not None), mesh)
    initial = InitialFactors.of(config.lora_cfg, spec.seed, is_whole=config.vision.enabled, stored=weights.stored)
    weights.load(initial)
    if spec.trains:
        weights.choose_trained(config)
    chunks = wrap_chunks(model, backend.distributed_data_parallel_config) if spec.trains else []

    def build(parameters: list[nn.Parameter], described: Mapping[nn.Parameter, OptimizedParameter]) -> Optimizer:
        return build_optimizer(with_fused_step(config.optimizer, parameters), parameters, described=described)

    optimizer = None
    if spec.trains:
        optimizer = MegatronOptimizer(chunks, build, weights.is_counted, weights.described)
    shape = shape_of(model, weights, trains_routers=not backend.freeze_moe_router)
    passes = MegatronModel(model, chunks, weights, mesh, shape=shape, reports_layers=backend.moe_per_layer_logging)
    return TrainingParts(
        passes,
        weights,
        optimizer,
        MegatronState(model, weights, optimizer, mesh),
        MegatronResidency(model, optimizer, mesh.kind),
        plan_step=None if model.memory is None else passes.plan_step,
        initial=initial if initial.is_principal else None,
    )


def shape_of(model: ReadingModel, weights: MegatronWeights, *, trains_routers: bool) -> ModelShape:
    """Return the shape of a whole model with its adapters, whatever part of it this rank holds.

    A vision tower is left out, because its work does not follow from the tokens.
    """
    language = [entry for entry in weights.maps if not entry.target.startswith(PREFIX)]
    # The embedding is looked up; a head that is tied to it multiplies with a copy.
    embedding = model.file_name(EMBEDDING)
    multiplied = [entry for entry in language if entry.copy_of or entry.sources[0].name != embedding]
    adapters = {half.target for adapter in model.adapters.values() for half in (adapter.down, adapter.up)}
    if adapters:
        trained = [entry for entry in multiplied if entry.target in adapters or entry.target == SCORE]
    else:
        trained = [entry for entry in multiplied if trains_routers or ".router." not in entry.target]

    def entries_for_one_token(maps: list[WeightMap]) -> int:
        """Return the entries of all matrices except of the experts that a token is not sent to."""
        sizes = [(entry, prod(each.part_shape)) for entry in maps for each in entry.sources if len(each.part_shape) > 1]
        dense = sum(size for entry, size in sizes if entry.over == "tp")
        experts = sum(size for entry, size in sizes if entry.over == "etp")
        # All experts of a model have one shape.
        chosen = experts * model.config.moe_router_topk // model.config.num_moe_experts if experts else 0
        return dense + chosen

    return ModelShape(entries_for_one_token(multiplied), entries_for_one_token(trained), attention_shapes(model.hf))
