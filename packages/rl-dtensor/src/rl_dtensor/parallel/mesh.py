"""The process groups of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain, combinations
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from rl_core.devices import Device
from rl_core.model import Coordinates, Rendezvous
from rl_core.torch.process_group import join_process_group
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel.sizes import AxisSizes, combination_problems

Direction = Literal["forward", "backward"]
"""Direction of tensors through a pipeline: activations forward, their gradients backward."""


@dataclass(frozen=True)
class DTensorMesh:
    """Place of this rank among the ranks of its model, and their groups.

    Args:
        sizes: Ranks along each axis.
        kind: The device that it computes on.
        control: All ranks, on gloo, for scalars that decide the next action of every rank.
        axes: `(pp, dp, cp, tp)`; the groups compute and count together.
        dense: `(pp, dp_replicate, fsdp, tp)`, the mesh that splits parameters; `fsdp` is `dp_shard x cp`.
        experts: `(pp, dp_replicate, efsdp, ep)`, the mesh that splits experts; None without expert parallelism. Its
            last axis has `ep x tp` ranks, as tensor-parallel ranks share the experts too.
        exchanges: Groups that tokens pass through on their way to experts: the ranks of that axis, or, if it spans
            several nodes, the ranks at one place of each node and then the ranks of a node. Empty without expert
            parallelism.
        ends: The first and the last rank of this rank's pipeline; None if it is neither.
        edges: Group of a sender and its receiver by direction and sending pipeline rank, in this rank's pipeline.
    """

    rank: int
    world_size: int
    sizes: AxisSizes
    kind: Device
    control: dist.ProcessGroup
    axes: DeviceMesh
    dense: DeviceMesh
    experts: DeviceMesh | None
    exchanges: Sequence[dist.ProcessGroup]
    ends: dist.ProcessGroup | None
    edges: Mapping[tuple[Direction, int], dist.ProcessGroup]

    @classmethod
    def join(cls, rendezvous: Rendezvous, config: DTensorConfig) -> DTensorMesh:
        """Meet the other ranks; collective. If that fails, this process is in no group afterwards.

        Raises:
            ValueError: If settings do not go together, or the world is not a multiple of the ranks that they need.
        """
        for problem in combination_problems(config):
            raise ValueError(f"{problem.key}: {problem.message}")
        sizes = AxisSizes.of(config, rendezvous.world_size)
        if config.compile:
            # Compiled code asks a mesh itself for its groups.
            _forget_meshes()
        join_process_group(rendezvous)
        try:
            return cls.of_joined(rendezvous, sizes)
        except BaseException:
            dist.destroy_process_group()
            raise

    @classmethod
    def of_joined(
        cls, rendezvous: Rendezvous, sizes: AxisSizes, *, control: str = "gloo", node_size: int | None = None
    ) -> DTensorMesh:
        """Make the groups of the axes from the ranks that have met; collective.

        Args:
            rendezvous: Place of this rank among them.
            sizes: Ranks along each axis.
            control: Backend of the group of all ranks that decides the next action of every rank.
            node_size: Number of ranks on each node; None to ask the other ranks.
        """
        rank, timeout = rendezvous.rank, timedelta(seconds=rendezvous.timeout_s)

        def meshed(**ranks: int) -> DeviceMesh:
            return init_device_mesh(rendezvous.kind.kernels, tuple(ranks.values()), mesh_dim_names=tuple(ranks))

        # Meshes come first: groups are named by their number, so equal meshes get groups of equal names.
        axes = meshed(pp=sizes.pp, dp=sizes.dp, cp=sizes.cp, tp=sizes.tp)
        dense = meshed(pp=sizes.pp, dp_replicate=sizes.dp_replicate, fsdp=sizes.fsdp, tp=sizes.tp)
        experts: DeviceMesh | None = None
        if sizes.ep > 1:
            efsdp, ep = sizes.fsdp // sizes.ep, sizes.ep * sizes.tp
            experts = meshed(pp=sizes.pp, dp_replicate=sizes.dp_replicate, efsdp=efsdp, ep=ep)
        _recall(dense, experts)
        everyone = dist.new_group(backend=control, timeout=timeout)
        exchanges: Sequence[dist.ProcessGroup] = []
        if experts is not None:
            node_size = node_size or _node_size(rendezvous, everyone)
            exchanges = _exchanges(rendezvous, experts, node_size, timeout)
        ends, edges = _pipeline_groups(rank, sizes, timeout)
        kind, world_size = rendezvous.kind, rendezvous.world_size
        return cls(rank, world_size, sizes, kind, everyone, axes, dense, experts, exchanges, ends, edges)

    @property
    def device(self) -> torch.device:
        """Device that this rank computes on, for torch."""
        return self.kind.torch_device

    @property
    def coordinates(self) -> Coordinates:
        """Place of this rank; `ep` folds into the others."""
        index = {axis: self.on(axis) for axis in ("pp", "dp", "cp", "tp")}
        index["ep"] = 0 if self.experts is None else self.experts.get_local_rank("ep") // self.sizes.tp
        sizes = self.sizes
        return Coordinates(index, {"pp": sizes.pp, "dp": sizes.dp, "cp": sizes.cp, "tp": sizes.tp, "ep": sizes.ep})

    @property
    def on(self) -> Callable[[str], int]:
        """Function from `pp`, `dp`, `cp` or `tp` to this rank's index on it."""
        return self.axes.get_local_rank

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one only on `axis`, one of `pp`, `dp`, `cp` and `tp`.

        Parameters are split over the group of `tp` too: NCCL holds buffers for each group that is used.
        """
        mesh = self.dense if axis == "tp" else self.axes
        return mesh.get_group(axis)

    @property
    def sharding(self) -> DeviceMesh:
        """Mesh over which FSDP2 shards, `(fsdp,)` or `(dp_replicate, fsdp)`."""
        return self.dense["fsdp"] if self.sizes.dp_replicate == 1 else self.dense["dp_replicate", "fsdp"]

    @property
    def expert_sharding(self) -> DeviceMesh:
        """Mesh over which FSDP2 shards this rank's experts, `(efsdp,)` or `(dp_replicate, efsdp)`."""
        assert self.experts is not None
        return self.experts["efsdp"] if self.sizes.dp_replicate == 1 else self.experts["dp_replicate", "efsdp"]

    @property
    def num_gradients(self) -> int:
        """Number of gradients that FSDP2 averages: one for each rank with different tokens."""
        return self.sizes.dp_replicate * self.sizes.fsdp

    @property
    def data(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the model and other rows."""
        return self.group("dp")

    @property
    def layout(self) -> Mapping[str, int]:
        """Ranks along each axis."""
        return asdict(self.sizes)

    def seed(self, seed: int) -> None:
        """Seed torch's generators, alike on the ranks that share rows."""
        torch.manual_seed(seed + self.on("dp"))

    @property
    def rng_state(self) -> Callable[[], dict[str, Any]]:
        """Function that returns the state of torch's generators."""
        return self.kind.rng_state

    @property
    def set_rng_state(self) -> Callable[[Mapping[str, Any]], None]:
        """Function that continues from a state of `rng_state`."""
        return self.kind.set_rng_state

    def leave(self) -> None:
        """Leave the groups, and free their threads and connections."""
        dist.destroy_process_group()
        # DTensor's caches keep the meshes, which would keep their groups, each with a thread that polls.
        for mesh in (self.axes, self.dense, self.experts):
            if mesh is not None:
                mesh._pg_registry.clear()


_known: dict[tuple[object, ...], list[str]] = {}
"""Names of the groups of each mesh that DTensor's caches may hold, by the world's size, its ranks and its axes."""


def _recall(*meshes: DeviceMesh | None) -> None:
    """Use the results that DTensor has cached with meshes of earlier models of this process, if they are valid here.

    A cached result has the earlier mesh, which finds its groups by their names. It is valid for an equal mesh whose
    groups have these names. If any of these meshes or of their parts has other names, everything is forgotten.
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for mesh in meshes:
        # Tensors may be split over some of a mesh's axes; a stage of a pipeline has its own.
        axes = () if mesh is None else (mesh.mesh_dim_names or ())[1:]
        for chosen in chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1)):
            if mesh is not None and chosen != ("dp_replicate",):
                part = mesh[chosen]
                ranks = part.mesh
                known_by = (dist.get_world_size(), tuple(ranks.flatten().tolist()), ranks.shape, part.mesh_dim_names)
                found[known_by] = [group.group_name for group in part.get_all_groups()]
    if any(_known.get(known_by, names) != names for known_by, names in found.items()):
        _forget_meshes()
    _known.update(found)


def _forget_meshes() -> None:
    """Clear DTensor's results that are cached by mesh."""
    _known.clear()
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _node_size(rendezvous: Rendezvous, everyone: dist.ProcessGroup) -> int:
    """Return the number of ranks on each node; the number of all ranks if nodes have different numbers."""
    places = [torch.zeros((), dtype=torch.int64) for _ in range(rendezvous.world_size)]
    dist.all_gather(places, torch.tensor(rendezvous.local_rank), group=everyone)
    found = [int(place) for place in places]
    size = max(found) + 1
    is_even = len(found) % size == 0 and all(place == rank % size for rank, place in enumerate(found))
    return size if is_even else len(found)


def _exchanges(
    rendezvous: Rendezvous, experts: DeviceMesh, node_size: int, timeout: timedelta
) -> list[dist.ProcessGroup]:
    size = experts["ep"].size()
    if not 1 < node_size < size or size % node_size:
        return [experts.get_group("ep")]
    found = []
    for first in range(0, rendezvous.world_size, size):
        ranks = range(first, first + size)
        between = [list(ranks[place::node_size]) for place in range(node_size)]
        inside = [list(ranks[start : start + node_size]) for start in range(0, size, node_size)]
        for members in (*between, *inside):
            group = dist.new_group(members, timeout=timeout)
            if rendezvous.rank in members:
                found.append(group)
    return found


def _pipeline_groups(
    rank: int, sizes: AxisSizes, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dict[tuple[Direction, int], dist.ProcessGroup]]:
    """Make the groups of the two ends of each pipeline, then a group for each sender and direction.

    One group for both directions could wait in opposite orders at its two ends.
    """
    ends, edges = None, {}
    stride = sizes.dp * sizes.cp * sizes.tp
    columns = range(stride if sizes.pp > 1 else 0)
    for column in columns:
        ranks = [column, column + (sizes.pp - 1) * stride]
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            ends = group
    steps: dict[Direction, int] = {"forward": 1, "backward": -1}
    for column in columns:
        for sender in range(sizes.pp):
            for direction, step in steps.items():
                receiver = (sender + step) % sizes.pp
                ranks = sorted(column + place * stride for place in (sender, receiver))
                group = dist.new_group(ranks, timeout=timeout)
                if rank % stride == column:
                    edges[direction, sender] = group
    return ends, edges
