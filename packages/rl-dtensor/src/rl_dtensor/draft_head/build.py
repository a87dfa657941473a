"""A draft head built from its files, next to the policy that it drafts for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rl_core.model_config import DraftHeadConfig, ModelConfig
from rl_core.torch.files.file_names import FilePiece
from rl_core.torch.files.model_files import CONFIG, WeightFiles, fetched_folder
from rl_core.torch.optim.parameters import check_patterns, describe_parameters
from rl_core.torch.training.backend import HeadParts
from rl_core.weights import TensorSpec
from rl_dtensor.config import DTensorConfig
from rl_dtensor.draft_head.eagle import ARCHITECTURES, DRAFT_TO_TARGET, TARGET_TO_DRAFT, EagleHead, HeadShape
from rl_dtensor.draft_head.head import Head
from rl_dtensor.draft_head.model import DraftHeadModel, ShardedHead
from rl_dtensor.draft_head.mtp import FAMILIES, MtpHead, with_one_more_layer
from rl_dtensor.model.kernels import kernel_of
from rl_dtensor.model.settings import DRAFT_KEY, draft_head_problems
from rl_dtensor.model.weights import read_into
from rl_dtensor.model.whole import decoder_layers, model_on_meta
from rl_dtensor.parallel.fsdp import local_slices, shard_whole, whole
from rl_dtensor.parallel.mesh import DTensorMesh
from rl_dtensor.training.state import DTensorState
from rl_dtensor.training.step import DTensorModel, DTensorOptimizer, build_sharded_optimizer, norm_of


def build_draft_head(
    config: ModelConfig, settings: DraftHeadConfig, backend: DTensorConfig, policy: DTensorModel, mesh: DTensorMesh
) -> tuple[ShardedHead, HeadParts]:
    """Build on `meta`, shard, then load this rank's slices; collective. Parameters are float32.

    Args:
        config: Settings of the policy.
        settings: Settings of the head.
        backend: Settings of the policy's backend.
        policy: The policy, loaded.
        mesh: Mesh of both.

    Raises:
        ValueError: If the files do not hold a head of this policy, or the settings exclude one.
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
    draft_ids: Tensor | None = None
    sent: dict[str, Tensor] = {}
    exported: dict[str, Tensor] = {}
    if isinstance(module, EagleHead) and module.shape.is_reduced:
        # The files hold the distance of each token of the reduced vocabulary from the policy's token.
        with files.open() as opened:
            distances = opened.read(DRAFT_TO_TARGET, (slice(None),)).to(mesh.device, torch.int64)
        draft_ids = distances + torch.arange(len(distances), device=mesh.device)
        is_drafted = torch.zeros(module.shape.vocabulary, dtype=torch.bool, device=mesh.device)
        sent = {DRAFT_TO_TARGET: distances}
        exported = {**sent, TARGET_TO_DRAFT: is_drafted.index_fill(0, draft_ids, value=True)}
    head = ShardedHead(module, draft_ids)
    check_patterns("draft_head.optimizer.lr_scales", settings.optimizer.lr_scales, list(head.state()))
    described = describe_parameters([head.module], place_of=local_slices)
    inner = build_sharded_optimizer(settings.optimizer, [head.trained()], described)
    parts = HeadParts(
        folder,
        DraftHeadModel(head, policy, mesh),
        HeadWeights(module, sent, mesh),
        HeadWeights(module, exported, mesh),
        DTensorOptimizer(inner, lambda own: norm_of([(each.grad, 1) for each in own if each.grad is not None], mesh)),
        DTensorState(head, inner, mesh),
    )
    return head, parts


def _head_in(
    folder: Path, files: WeightFiles, config: ModelConfig, backend: DTensorConfig, policy: DTensorModel
) -> Head:
    """Return the head in a folder.

    Raises:
        ValueError: If there is none, or not one of this policy.
    """
    fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    hf = policy.hf_config.get_text_config()
    attend, chunk_size = kernel_of(backend.attention_backend), config.logprob_chunk_size
    if set(fields.get("architectures") or ()) & set(ARCHITECTURES):
        (chunk,) = policy.sharded.chunks
        num_layers, width = len(decoder_layers(chunk.hf)), hf.hidden_size
        shape = HeadShape.of(folder, files.names, num_layers=num_layers, policy_width=width, vocabulary=hf.vocab_size)
        return EagleHead(shape, attend=attend, chunk_size=chunk_size)
    if fields.get("model_type") in FAMILIES:
        longer = model_on_meta(
            with_one_more_layer(hf, folder, fields),
            "policy",
            backend.attention_backend,
            dtype=torch.float32,
            is_packed=True,
            is_split=False,
            longest_row=config.max_total_sequence_length,
        )
        return MtpHead(longer, attend=attend, chunk_size=chunk_size)
    raise ValueError(
        f"{DRAFT_KEY}: {folder} does not hold a draft head: its architectures are {fields.get('architectures')}; "
        f"allowed are {', '.join(ARCHITECTURES)}, and models of the type {', '.join(FAMILIES)} with a layer for "
        "multi-token prediction"
    )


class HeadWeights:
    """The `rl_core.torch.training.backend.RankWeights` of a head, by file names.

    Args:
        head: This rank's part.
        maps: Tensors of the files that the module lacks, such as the map between both vocabularies.
    """

    tied: Mapping[str, str] = {}

    def __init__(self, head: Head, maps: Mapping[str, Tensor], mesh: DTensorMesh) -> None:
        stored = list(_stored(head))
        self._weights = [(pieces, tensor) for pieces, tensor in stored if isinstance(tensor, nn.Parameter)]
        buffers = [(pieces, tensor) for pieces, tensor in stored if not isinstance(tensor, nn.Parameter)]
        self._fixed = {piece.name: tensor for (piece,), tensor in buffers} | dict(maps)
        self.holders: Sequence[int] = range(mesh.world_size)

    def specs(self, dtype: str) -> list[TensorSpec]:
        """Return all tensors, parameters in a dtype."""
        weights = [TensorSpec(piece.name, piece.shape, dtype) for pieces, _ in self._weights for piece in pieces]
        fixed = self._fixed.items()
        return weights + [
            TensorSpec(name, tuple(own.shape), str(own.dtype).removeprefix("torch.")) for name, own in fixed
        ]

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = True,
        bucket_bytes: int = 0,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Yield whole tensors in the order of `specs`, one parameter at a time, on every rank; collective. Only
        `dtype` is used."""
        for pieces, tensor in self._weights:
            gathered = whole(tensor, getattr(torch, dtype))
            yield [(piece.name, gathered[piece.region]) for piece in pieces]
        for name, own in self._fixed.items():
            yield [(name, own)]

    def holdings(self, dtype: str) -> None:
        """Return None: a head is small enough to be sent whole."""

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """Return nothing: a head has no adapters."""
        return []

    def adapters(self, dtype: str = "float32", *, everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Return nothing."""
        yield from ()


def load_head(head: Head, files: WeightFiles) -> None:
    """Fill this rank's part of a head from its files.

    Raises:
        ValueError: Naming tensors that are missing or unexpected, or one of another shape.
    """
    stored = [(piece, tensor) for pieces, tensor in _stored(head) for piece in pieces]
    names = {piece.name for piece, _ in stored}
    missing = sorted(names - files.names)
    unexpected = sorted(head.names_among(files.names) - names)
    if missing or unexpected:
        raise ValueError(
            f"{DRAFT_KEY}: the weights in {files.folder} are not those of {head.kind}: missing {missing or 'none'}; "
            f"unexpected {unexpected or 'none'}"
        )
    with files.open() as opened, torch.no_grad():
        for piece, tensor in stored:
            read_into(opened, piece, tensor)


def _stored(head: Head) -> Iterator[tuple[Sequence[FilePiece], Tensor]]:
    """Yield this rank's part of each parameter and persistent buffer, and its tensors in the files."""
    for name, tensor in head.state_dict(keep_vars=True).items():
        yield list(head.pieces(name, tuple(tensor.shape))), tensor
