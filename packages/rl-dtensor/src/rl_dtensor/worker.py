"""One rank of a model on DTensor and FSDP2."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rl_core.data.microbatch import Batching
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.torch.training.backend import TrainingParts
from rl_core.torch.training.worker import TrainingWorker
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.build import build_model
from rl_dtensor.parallel.accumulation import GradientMemory, keeps_whole_gradients
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.training.adapters import DTensorAdapters
from rl_dtensor.training.state import DTensorResidency, DTensorState
from rl_dtensor.training.step import DTensorModel, DTensorOptimizer, build_sharded_optimizer, grad_norm


class DTensorWorker(TrainingWorker):
    """A `ModelWorker` whose layers are split over tensor-, context-, pipeline- and expert-parallel ranks, and whose
    parameters are sharded by FSDP2 over all ranks that are left.

    The constructor joins the process group, builds the model on `meta`, splits and shards it and loads this rank's
    slices of the Hugging Face files.

    Args:
        config: The model; master weights are float32 if it trains.
        backend: This backend's settings.
        spec: Its purpose. A reference has the weights at `config.model_name`, also after a `load`.
        rendezvous: Meeting point of the ranks.

    Raises:
        ValueError: If files, config, role and settings do not fit together.
    """

    def __init__(self, config: ModelConfig, backend: DTensorConfig, spec: ModelSpec, rendezvous: Rendezvous) -> None:
        mesh = DTensorMesh.join(rendezvous, backend)
        super().__init__(config, spec, mesh, partial(build_parts, config, backend, spec, mesh))


def build_parts(
    config: ModelConfig, backend: DTensorConfig, spec: ModelSpec, mesh: DTensorMesh, folder: Path
) -> TrainingParts:
    """Build, shard and load this rank's part of a model; collective."""
    is_packed = Batching.of(config, training=True).packed
    model = build_model(config, backend, spec, folder=folder, is_packed=is_packed, mesh=mesh)
    inner, described = None, model.described()
    if spec.trains:
        inner = build_sharded_optimizer(config.optimizer, model.trained_groups(), described)
    memory = GradientMemory.of(model.parameters(), config.optimizer, described, cpu_offload=backend.cpu_offload)
    keeps_whole = spec.trains and keeps_whole_gradients(backend.gradient_accumulation, memory, mesh)
    policy = DTensorModel(model, mesh, keeps_whole_gradients=keeps_whole)
    if backend.reshard_after == "step":
        policy.keep_gathered()
    head_parts, resident_head = None, None
    if config.draft_head is not None and spec.trains:
        # The module imports the code of a family, which other policies do not need.
        from rl_dtensor.draft_head.build import build_draft_head

        head, head_parts = build_draft_head(config, config.draft_head, backend, policy, mesh)
        resident_head = head, head_parts.optimizer.inner
    adapters = None
    if config.lora_cfg.enabled and config.lora_cfg.max_adapters > 1:
        adapters = DTensorAdapters(model, inner, config.lora_cfg, mesh)
    return TrainingParts(
        policy,
        model.weights,
        None if inner is None else DTensorOptimizer(inner, partial(grad_norm, model, mesh)),
        DTensorState(model, inner, mesh, adapters),
        DTensorResidency(model, inner, mesh.kind, resident_head),
        head_parts,
        None if model.memory is None else policy.plan_step,
        model.shares_prefixes,
        model.initial,
        adapters,
    )
