"""The weights of a draft head by the names of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rl_core.torch.files.model_files import WeightFiles
from rl_core.weights import TensorSpec
from rl_dtensor.draft_head.head import EagleHead
from rl_dtensor.draft_head.shape import DRAFT_TO_TARGET, KEY, TARGET_TO_DRAFT
from rl_dtensor.model.names import Piece
from rl_dtensor.model.weights import read_into
from rl_dtensor.parallel.fsdp import whole
from rl_dtensor.parallel.mesh import Mesh


class HeadWeights:
    """The `rl_core.torch.training.backend.RankWeights` of a head.

    Args:
        head: This rank's part.
        maps: Tensors of the files that do not train, such as the map between both vocabularies.
    """

    def __init__(self, head: EagleHead, maps: Mapping[str, Tensor], mesh: Mesh) -> None:
        self._tensors = {head.shape.in_files(name): parameter for name, parameter in head.named_parameters()}
        self._maps = dict(maps)
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
        """All tensors, weights in a dtype."""
        weights = [TensorSpec(name, tuple(tensor.shape), dtype) for name, tensor in self._tensors.items()]
        maps = [TensorSpec(name, tuple(map_.shape), _name_of(map_.dtype)) for name, map_ in self._maps.items()]
        return weights + maps

    def stream(
        self,
        dtype: str,
        *,
        everywhere: bool = True,
        bucket_bytes: int = 0,
        merges_adapters: bool = True,
        served: bool = False,
    ) -> Iterator[Sequence[tuple[str, Tensor]]]:
        """Whole tensors one by one in the order of `specs`, on every rank; collective. Only `dtype` is used."""
        for name, tensor in self._tensors.items():
            yield [(name, whole(tensor, getattr(torch, dtype)))]
        for name, map_ in self._maps.items():
            yield [(name, map_)]

    def adapter_specs(self, dtype: str) -> list[TensorSpec]:
        """Return nothing: a head has no adapters."""
        return []

    def adapters(self, dtype: str = "float32", *, everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Return nothing."""
        yield from ()


def load_head(head: EagleHead, files: WeightFiles) -> None:
    """Fill this rank's part of a head from its files.

    Raises:
        ValueError: Naming tensors that are missing or unexpected, or one of another shape.
    """
    names = {head.shape.in_files(name): parameter for name, parameter in head.named_parameters()}
    missing = sorted(names.keys() - files.names)
    unexpected = sorted(files.names - names.keys() - {DRAFT_TO_TARGET, TARGET_TO_DRAFT})
    if missing or unexpected:
        raise ValueError(
            f"{KEY}: the weights in {files.folder} are not those of an EAGLE-3 head: missing {missing or 'none'}; "
            f"unexpected {unexpected or 'none'}"
        )
    with files.open() as opened, torch.no_grad():
        for name, parameter in names.items():
            read_into(opened, Piece(name, (), tuple(parameter.shape)), parameter)


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
