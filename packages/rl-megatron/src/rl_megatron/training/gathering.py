"""Parameters that are spread over ranks, made whole on all ranks that share a copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.parallel.mesh import MegatronMesh

ALIGNMENT = 16
"""Alignment in bytes of every part in a buffer, because parts are viewed in any dtype."""

Holding = tuple[int, tuple[int, ...]]
"""One rank's share of a parameter: its index among the shares, and its shape."""


class Gathering:
    """Knows which ranks hold which shares of each parameter, and brings the shares together.

    A parameter is whole within the ranks that share one copy of the model: the tensor- and pipeline-parallel ones, and
    for experts the expert-, expert-tensor- and pipeline-parallel ones. So nothing travels between copies.

    The larger of rank 0's two groups (in a model without experts, the tensor- and pipeline-parallel ranks) are the
    `holders`: each share reaches all of them by the same broadcast that brings it to rank 0.

    Args:
        held: This rank's parameters by target.
        holdings: Which share of each of them it has.
        mesh: All ranks; building one is collective over them.
        has_experts: True if the model has parameters of experts, on whatever rank.

    Attributes:
        holders: Ranks that get what is not wanted everywhere, the same on all ranks.
    """

    def __init__(
        self, held: Mapping[str, Tensor], holdings: Mapping[str, Holding], mesh: MegatronMesh, *, has_experts: bool
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
        # Rank 0 sends the ranks of its groups to all ranks.
        groups = [self._ranks["tp"], *([self._ranks["etp"]] if has_experts else [])]
        sent = [max(groups, key=len)]
        dist.broadcast_object_list(sent, src=0, group=mesh.control)
        self.holders: Sequence[int] = sent[0]
        self._takes_part = {over: not set(ranks).isdisjoint(self.holders) for over, ranks in self._ranks.items()}

    def first_holder(self, target: str, share: int) -> int:
        """Return the lowest of all ranks that hold a share."""
        return self._first[target][share][0]

    def join(
        self, wanted: Sequence[tuple[WeightMap, torch.dtype]], *, everywhere: bool
    ) -> list[tuple[Tensor, ...] | None]:
        """Return the Hugging Face tensors of some parameters, each in its dtype; collective.

        All shares that a rank gives travel in one buffer, so that the number of collectives depends on the number of
        ranks and not on the number of parameters.

        Args:
            wanted: Parameters to gather, each with the dtype of its tensors.
            everywhere: True if every rank needs them; otherwise the holders get them, and other ranks None.
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

    def _shares(self, over: str, wanted: Sequence[tuple[WeightMap, torch.dtype]]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the index, share and part of the wanted parameters that are spread over these ranks."""
        mine = [(index, entry, dtype) for index, (entry, dtype) in enumerate(wanted) if entry.over == over]
        if len(self._ranks[over]) == 1:
            for index, entry, dtype in mine:
                yield index, 0, self._held[entry.target].detach().to(dtype).contiguous()
            return
        # For each rank, its shares of wanted parameters with their places in its buffer: index, share, shape, dtype,
        # first and last byte.
        given: dict[int, list[tuple[int, int, tuple[int, ...], torch.dtype, int, int]]] = {}
        sizes: dict[int, int] = {}
        for index, entry, dtype in mine:
            for rank, (share, shape) in self._near[over][entry.target].values():
                start = sizes.get(rank, 0)
                num_bytes = torch.Size(shape).numel() * dtype.itemsize
                sizes[rank] = start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
                given.setdefault(rank, []).append((index, share, shape, dtype, start, start + num_bytes))
        for rank in sorted(given):
            buffer = torch.empty(sizes[rank], dtype=torch.uint8, device=self._mesh.device)
            views = [buffer[start:end].view(dtype).view(shape) for *_, shape, dtype, start, end in given[rank]]
            if rank == self._mesh.rank:
                for view, (index, *_) in zip(views, given[rank], strict=True):
                    view.copy_(self._held[wanted[index][0].target].detach())
            dist.broadcast(buffer, rank, group=self._groups[over])
            for view, (index, share, *_) in zip(views, given[rank], strict=True):
                yield index, share, view


def _holders(
    everyone: Sequence[Mapping[str, Holding]], ranks: Sequence[int]
) -> dict[str, dict[int, tuple[int, Holding]]]:
    """Return for every parameter the first of some ranks that has each share, in the order of shares."""
    found: dict[str, dict[int, tuple[int, Holding]]] = {}
    for rank in ranks:
        for target, holding in everyone[rank].items():
            found.setdefault(target, {}).setdefault(holding[0], (rank, holding))
    return {target: dict(sorted(shares.items())) for target, shares in found.items()}
