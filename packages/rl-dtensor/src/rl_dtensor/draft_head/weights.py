"""The weights of a draft head by the names of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rl_core.torch.files.model_files import WeightFiles
from rl_core.weights import TensorSpec
from rl_dtensor.draft_head.eagle_shape import DRAFT_TO_TARGET
from rl_dtensor.draft_head.head import Head
from rl_dtensor.draft_head.settings import KEY
from rl_dtensor.model.names import Piece
from rl_dtensor.model.weights import read_into
from rl_dtensor.parallel.fsdp import whole
from rl_dtensor.parallel.mesh import Mesh


class HeadWeights:
    """The `rl_core.torch.training.backend.RankWeights` of a head.

    Args:
        head: This rank's part.
        maps: Tensors of the files that the module lacks, such as the map between both vocabularies.
    """

    def __init__(self, head: Head, maps: Mapping[str, Tensor], mesh: Mesh) -> None:
        stored = list(_stored(head))
        self._weights = [(pieces, tensor) for pieces, tensor in stored if isinstance(tensor, nn.Parameter)]
        buffers = [(pieces, tensor) for pieces, tensor in stored if not isinstance(tensor, nn.Parameter)]
        self._fixed = {piece.name: tensor for (piece,), tensor in buffers} | dict(maps)
        self._mesh = mesh

    @property
    def tied(self) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    @property
    def holders(self) -> Sequence[int]:
        """All ranks."""
        return range(self._mesh.world_size)

    def specs(self, dtype: str) -> list[TensorSpec]:
        """All tensors, parameters in a dtype."""
        weights = [TensorSpec(piece.name, piece.shape, dtype) for pieces, _ in self._weights for piece in pieces]
        return weights + [TensorSpec(name, tuple(own.shape), _name_of(own.dtype)) for name, own in self._fixed.items()]

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = True,
        bucket_bytes: int = 0,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Whole tensors in the order of `specs`, those of one parameter at a time, on every rank; collective. Only
        `dtype` is used."""
        for pieces, tensor in self._weights:
            gathered = whole(tensor, getattr(torch, dtype))
            yield [(piece.name, gathered[piece.region]) for piece in pieces]
        for name, own in self._fixed.items():
            yield [(name, own)]

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
            f"{KEY}: the weights in {files.folder} are not those of {head.kind}: missing {missing or 'none'}; "
            f"unexpected {unexpected or 'none'}"
        )
    with files.open() as opened, torch.no_grad():
        for piece, tensor in stored:
            read_into(opened, piece, tensor)


def _stored(head: Head) -> Iterator[tuple[Sequence[Piece], Tensor]]:
    """This rank's part of each parameter and persistent buffer, and the tensors of the files that make it up."""
    for name, tensor in head.state_dict(keep_vars=True).items():
        yield list(head.pieces(name, tuple(tensor.shape))), tensor


def read_map(files: WeightFiles, device: torch.device) -> Tensor:
    """The distance from each token of a reduced vocabulary to the policy's token that it stands for, int64."""
    with files.open() as opened:
        return opened.read(DRAFT_TO_TARGET, (slice(None),)).to(device, torch.int64)


def is_drafted(draft_ids: Tensor, vocabulary: int) -> Tensor:
    """Bool `[vocabulary]`, the policy's tokens that can be drafted."""
    found = torch.zeros(vocabulary, dtype=torch.bool, device=draft_ids.device)
    return found.index_fill(0, draft_ids, value=True)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
