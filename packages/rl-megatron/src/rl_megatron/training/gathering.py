"""Parameters that are spread over ranks, made whole on all of those that share a copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.parallel.mesh import Mesh

ALIGNMENT = 16
"""Bytes of which every part in a buffer starts at a multiple, as views in any dtype demand."""


@dataclass(frozen=True)
class Holding:
    """One rank's share of a parameter.

    Args:
        share: Its index among the shares.
        shape: Shape of that share.
    """

    share: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Packed:
    """A share of a wanted parameter, by the index of the parameter, and its place in its holder's buffer."""

    wanted: int
    holding: Holding
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.holding.shape).numel() * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype).view(self.holding.shape)


class Gathering:
    """Knows which ranks hold what of each parameter, and brings the shares together.

    A parameter is whole within the ranks that share one copy of the model: the tensor- and pipeline-parallel ones, and
    for experts the expert-, expert-tensor- and pipeline-parallel ones. So nothing travels between copies.

    Those of rank 0 that are more (all of a model without experts are tensor- and pipeline-parallel ones) are the
    `holders`: each share reaches all of them by the same broadcast that brings it to rank 0.

    Args:
        held: This rank's parameters by target.
        holdings: Which share of each of them it has.
        mesh: All ranks; building one is collective over them.
        has_experts: True if parameters of the model are those of experts, on whatever rank.

    Attributes:
        holders: Ranks that get what is not wanted everywhere, the same on all ranks.
    """

    def __init__(
        self, held: Mapping[str, Tensor], holdings: Mapping[str, Holding], mesh: Mesh, *, has_experts: bool
    ) -> None:
        self._held = held
        self._mesh = mesh
        everyone: list[Mapping[str, Holding]] = [{}] * mesh.world_size
        dist.all_gather_object(everyone, dict(holdings), group=mesh.control)
        self._groups = {
            "tp": parallel_state.get_model_parallel_group(),
            "etp": parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
        }
        self._ranks = {over: dist.get_process_group_ranks(group) for over, group in self._groups.items()}
        self._first = _holders(everyone, range(mesh.world_size))
        self._near = {over: _holders(everyone, ranks) for over, ranks in self._ranks.items()}
        self.holders: Sequence[int] = self._of_rank0(has_experts=has_experts)
        self._takes_part = {over: not set(ranks).isdisjoint(self.holders) for over, ranks in self._ranks.items()}

    def first_holder(self, target: str, share: int) -> int:
        """The lowest of all ranks that hold a share."""
        return self._first[target][share][0]

    def join(
        self, wanted: Sequence[tuple[WeightMap, torch.dtype]], *, everywhere: bool
    ) -> list[tuple[Tensor, ...] | None]:
        """The Hugging Face tensors of some parameters, each in its dtype; collective.

        All shares that a rank gives travel in one buffer, so that the number of collectives depends on the number of
        ranks and not on that of parameters.

        Args:
            wanted: Parameters to gather, each with the dtype of its tensors.
            everywhere: True if every rank needs them; otherwise the holders get them, and None stands elsewhere.
        """
        parts: list[dict[int, Tensor]] = [{} for _ in wanted]
        for over in ("tp", "etp"):
            if everywhere or self._takes_part[over]:
                for index, share, part in self._shares(over, wanted):
                    parts[index][share] = part
        needs = everywhere or self._mesh.rank in self.holders
        return [
            entry.split.join([found[share] for share in sorted(found)]) if needs else None
            for (entry, _), found in zip(wanted, parts, strict=True)
        ]

    def _of_rank0(self, *, has_experts: bool) -> list[int]:
        """The ranks of rank 0's groups, on every rank."""
        groups = [self._ranks["tp"], *([self._ranks["etp"]] if has_experts else [])]
        told = [max(groups, key=len)]
        dist.broadcast_object_list(told, src=0, group=self._mesh.control)
        return told[0]

    def _shares(self, over: str, wanted: Sequence[tuple[WeightMap, torch.dtype]]) -> Iterator[tuple[int, int, Tensor]]:
        """Index, share and part of the wanted parameters that are spread over these ranks."""
        mine = [(index, entry, dtype) for index, (entry, dtype) in enumerate(wanted) if entry.over == over]
        if len(self._ranks[over]) == 1:
            for index, entry, dtype in mine:
                yield index, 0, self._own(entry.target, dtype)
            return
        given: dict[int, list[_Packed]] = {}
        sizes: dict[int, int] = {}
        for index, entry, dtype in mine:
            for rank, holding in self._near[over][entry.target].values():
                packed = _Packed(index, holding, dtype, sizes.get(rank, 0))
                sizes[rank] = packed.start + -(-packed.num_bytes // ALIGNMENT) * ALIGNMENT
                given.setdefault(rank, []).append(packed)
        for rank in sorted(given):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8, device=self._mesh.device)
            if rank == self._mesh.rank:
                for packed in given[rank]:
                    packed.view(buffer).copy_(self._held[wanted[packed.wanted][0].target].detach())
            dist.broadcast(buffer, rank, group=self._groups[over])
            for packed in given[rank]:
                yield packed.wanted, packed.holding.share, packed.view(buffer)

    def _own(self, target: str, dtype: torch.dtype) -> Tensor:
        return self._held[target].detach().to(dtype).contiguous()


def _holders(
    everyone: Sequence[Mapping[str, Holding]], ranks: Sequence[int]
) -> dict[str, dict[int, tuple[int, Holding]]]:
    """For every parameter the first of some ranks that has each share, in the order of shares."""
    found: dict[str, dict[int, tuple[int, Holding]]] = {}
    for rank in ranks:
        for target, holding in everyone[rank].items():
            found.setdefault(target, {}).setdefault(holding.share, (rank, holding))
    return {target: dict(sorted(shares.items())) for target, shares in found.items()}
