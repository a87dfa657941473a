"""A draft head built from its files, next to the policy that it drafts for."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_core.model_config import DraftHeadConfig, ModelConfig
from rl_core.torch.files.model_files import WeightFiles, fetched_folder
from rl_core.torch.training.backend import HeadParts
from rl_dtensor.config import DTensorConfig
from rl_dtensor.draft_head.head import EagleHead
from rl_dtensor.draft_head.model import DraftHeadModel, ShardedHead
from rl_dtensor.draft_head.settings import draft_head_problems
from rl_dtensor.draft_head.shape import DRAFT_TO_TARGET, TARGET_TO_DRAFT, HeadShape
from rl_dtensor.draft_head.weights import HeadWeights, is_drafted, load_head, read_map
from rl_dtensor.model.build import decoder_layers
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.parallel.fsdp import shard_whole
from rl_dtensor.parallel.mesh import Mesh
from rl_dtensor.training.optimizer import build_sharded_optimizer
from rl_dtensor.training.state import TrainingState
from rl_dtensor.training.step import DTensorModel, ShardedOptimizer


@dataclass(frozen=True)
class BuiltHead:
    """A head, and its parts for the training worker.

    Args:
        head: This rank's part.
        parts: Its parts.
    """

    head: ShardedHead
    parts: HeadParts


def build_draft_head(
    config: ModelConfig, settings: DraftHeadConfig, backend: DTensorConfig, policy: DTensorModel, mesh: Mesh
) -> BuiltHead:
    """Build on `meta`, shard, then load this rank's slices; collective. Parameters are float32.

    Args:
        config: Settings of the policy.
        settings: Settings of the head.
        backend: Settings of the policy's backend.
        policy: The policy, loaded.
        mesh: Mesh of both.

    Raises:
        ValueError: If the files are not those of a head of this policy, or the settings exclude one.
    """
    for problem in draft_head_problems(config, backend):
        raise ValueError(f"{problem.key}: {problem.message}")
    folder = fetched_folder(os.path.expanduser(settings.model_name), mesh.control)
    files = WeightFiles.of(folder)
    hf = policy.hf_config.get_text_config()
    (chunk,) = policy.sharded.chunks
    shape = HeadShape.of(
        folder,
        files.names,
        num_layers=len(decoder_layers(chunk.hf)),
        policy_width=hf.hidden_size,
        vocabulary=hf.vocab_size,
    )
    with torch.device("meta"):
        module = EagleHead(
            shape, attend=kernel_of(backend.attention_backend), chunk_size=config.logprob_chunk_size
        ).float()
    shard_whole(module, mesh=mesh, compute=getattr(torch, config.precision))
    module.to_empty(device=mesh.device)
    module.rotary_emb = LlamaRotaryEmbedding(shape.config).to(mesh.device)
    load_head(module, files)
    distances = read_map(files, mesh.device) if shape.is_reduced else None
    draft_ids = None
    sent, exported = {}, {}
    if distances is not None:
        draft_ids = distances + torch.arange(len(distances), device=mesh.device)
        sent = {DRAFT_TO_TARGET: distances}
        exported = {**sent, TARGET_TO_DRAFT: is_drafted(draft_ids, shape.vocabulary)}
    head = ShardedHead(module, draft_ids)
    inner = build_sharded_optimizer(settings.optimizer, [head.trained()])
    parts = HeadParts(
        folder,
        DraftHeadModel(head, policy, mesh),
        HeadWeights(module, sent, mesh),
        HeadWeights(module, exported, mesh),
        ShardedOptimizer(inner, head, lambda: head.grad_norm(mesh)),
        TrainingState(head, inner, mesh),
    )
    return BuiltHead(head, parts)
