"""A draft head built from its files, next to the policy that it drafts for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rl_core.model_config import DraftHeadConfig, ModelConfig
from rl_core.torch.files.model_files import CONFIG, WeightFiles, fetched_folder
from rl_core.torch.optim.optimizer import norms_and_biases
from rl_core.torch.training.backend import HeadParts
from rl_dtensor.config import DTensorConfig
from rl_dtensor.draft_head.eagle import EagleHead
from rl_dtensor.draft_head.eagle_shape import ARCHITECTURES, DRAFT_TO_TARGET, TARGET_TO_DRAFT, HeadShape
from rl_dtensor.draft_head.head import Head
from rl_dtensor.draft_head.model import DraftHeadModel, ShardedHead
from rl_dtensor.draft_head.mtp import FAMILIES, MtpHead, is_mtp, with_one_more_layer
from rl_dtensor.draft_head.settings import KEY, draft_head_problems
from rl_dtensor.draft_head.weights import HeadWeights, is_drafted, load_head, read_map
from rl_dtensor.model.build import decoder_layers, model_on_meta
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
    with torch.device("meta"):
        module = _head_in(folder, files, config, backend, policy).float()
    shard_whole(module, mesh=mesh, compute=getattr(torch, config.precision))
    module.to_empty(device=mesh.device)
    module.rebuild_rotary(mesh.device)
    load_head(module, files)
    draft_ids, sent, exported = _vocabulary(module, files, mesh.device)
    head = ShardedHead(module, draft_ids)
    inner = build_sharded_optimizer(settings.optimizer, [head.trained()], norms_and_biases([head.module]))
    parts = HeadParts(
        folder,
        DraftHeadModel(head, policy, mesh),
        HeadWeights(module, sent, mesh),
        HeadWeights(module, exported, mesh),
        ShardedOptimizer(inner, head, lambda: head.grad_norm(mesh)),
        TrainingState(head, inner, mesh),
    )
    return BuiltHead(head, parts)


def _head_in(
    folder: Path, files: WeightFiles, config: ModelConfig, backend: DTensorConfig, policy: DTensorModel
) -> Head:
    """The head that a folder holds.

    Raises:
        ValueError: If it holds none, or not one of this policy.
    """
    fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    hf = policy.hf_config.get_text_config()
    attend = kernel_of(backend.attention_backend)
    if set(fields.get("architectures") or ()) & set(ARCHITECTURES):
        (chunk,) = policy.sharded.chunks
        shape = HeadShape.of(
            folder,
            files.names,
            num_layers=len(decoder_layers(chunk.hf)),
            policy_width=hf.hidden_size,
            vocabulary=hf.vocab_size,
        )
        return EagleHead(shape, attend=attend, chunk_size=config.logprob_chunk_size)
    if is_mtp(fields):
        longer = model_on_meta(
            with_one_more_layer(hf, folder, fields),
            "policy",
            backend.attention_backend,
            dtype=torch.float32,
            is_packed=True,
            is_split=False,
            longest_row=config.max_total_sequence_length,
        )
        return MtpHead(longer, attend=attend, chunk_size=config.logprob_chunk_size)
    raise ValueError(
        f"{KEY}: {folder} does not hold a draft head: its architectures are {fields.get('architectures')}; allowed are "
        f"{', '.join(ARCHITECTURES)}, and models of the type {', '.join(FAMILIES)} with a layer for multi-token "
        "prediction"
    )


def _vocabulary(
    head: Head, files: WeightFiles, device: torch.device
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
    """Int64 `[draft vocabulary]`, the policy's token of each output of a head, None if they are the same; the maps that
    are sent with its weights, and those that are exported."""
    if not isinstance(head, EagleHead) or not head.shape.is_reduced:
        return None, {}, {}
    distances = read_map(files, device)
    draft_ids = distances + torch.arange(len(distances), device=device)
    sent = {DRAFT_TO_TARGET: distances}
    return draft_ids, sent, {**sent, TARGET_TO_DRAFT: is_drafted(draft_ids, head.shape.vocabulary)}
