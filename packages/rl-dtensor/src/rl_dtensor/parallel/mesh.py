"""The process groups of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from rl_core.mesh import Coordinates
from rl_core.model import Rendezvous
from rl_core.torch.process_group import join_process_group
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel.sizes import AxisSizes, combination_problems

Direction = Literal["forward", "backward"]
"""Which way tensors go through a pipeline: activations forward, their gradients backward."""


@dataclass(frozen=True)
class Mesh:
    """The place of this rank among the ranks of its model.

    Args:
        sizes: Ranks along each axis.
        kind: The device that it computes on.
        control: All ranks, on gloo: scalars that decide what every rank does next.
        axes: `(pp, dp, cp, tp)`, whose groups compute and count together.
        dense: `(pp, dp_replicate, fsdp, tp)`, over which parameters are split; `fsdp` is `dp_shard x cp`.
        experts: `(pp, dp_replicate, efsdp, ep)`, over which experts are split; None without expert parallelism. Its
            last axis has `ep x tp` ranks, as tensor-parallel ranks share the experts too.
        exchanges: Groups that tokens pass through on their way to experts: the ranks of that axis, or, if it spans
            several nodes, the ranks at one place of each node and then those of a node. Empty without expert
            parallelism.
        ends: The first and the last rank of this rank's pipeline; None if it is neither.
        edges: Direction and sending pipeline rank, to the group of it and the receiver; of this rank's pipeline.
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
    def join(cls, rendezvous: Rendezvous, config: DTensorConfig) -> Mesh:
        """Meet the other ranks; collective. If that fails, this process is in no group afterwards.

        Raises:
            ValueError: If settings do not go together, or the world is not a multiple of what they need.
        """
        for problem in combination_problems(config):
            raise ValueError(f"{problem.key}: {problem.message}")
        sizes = AxisSizes.of(config, rendezvous.world_size)
        if config.compile:
            # compiled code asks a mesh itself for its groups
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
    ) -> Mesh:
        """Make the groups of the axes out of the ranks that have met; collective.

        Args:
            rendezvous: Place of this rank among them.
            sizes: Ranks along each axis.
            control: Backend of the group of all ranks that decides what every rank does next.
            node_size: Number of ranks on each node; None to ask the other ranks.
        """
        timeout = timedelta(seconds=rendezvous.timeout_s)
        # first of all: groups are named by their number, and so those of equal meshes alike
        axes = _device_mesh(rendezvous, {"pp": sizes.pp, "dp": sizes.dp, "cp": sizes.cp, "tp": sizes.tp})
        dense = _device_mesh(
            rendezvous, {"pp": sizes.pp, "dp_replicate": sizes.dp_replicate, "fsdp": sizes.fsdp, "tp": sizes.tp}
        )
        experts = _expert_mesh(rendezvous, sizes)
        _recall(dense, experts)
        everyone = dist.new_group(backend=control, timeout=timeout)
        exchanges: Sequence[dist.ProcessGroup] = []
        if experts is not None:
            node_size = node_size or _node_size(rendezvous, everyone)
            exchanges = _exchanges(rendezvous, experts, node_size, timeout)
        return cls(
            rendezvous.rank,
            rendezvous.world_size,
            sizes,
            rendezvous.kind,
            everyone,
            axes,
            dense,
            experts,
            exchanges,
            _ends(rendezvous.rank, sizes, timeout),
            _edges(rendezvous.rank, sizes, timeout),
        )

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on, as torch names it."""
        return self.kind.torch_device

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place; `ep` folds into the others."""
        index = {axis: self.on(axis) for axis in ("pp", "dp", "cp", "tp")}
        index["ep"] = 0 if self.experts is None else self.experts.get_local_rank("ep") // self.sizes.tp
        sizes = self.sizes
        return Coordinates(index, {"pp": sizes.pp, "dp": sizes.dp, "cp": sizes.cp, "tp": sizes.tp, "ep": sizes.ep})

    def on(self, axis: str) -> int:
        """This rank's index on `pp`, `dp`, `cp` or `tp`."""
        return self.axes.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one only on `axis`, one of `pp`, `dp`, `cp` and `tp`.

        Parameters are split over the group of `tp` too: NCCL holds buffers for each group that is used.
        """
        return (self.dense if axis == "tp" else self.axes).get_group(axis)

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh FSDP2 shards over, `(fsdp,)` or `(dp_replicate, fsdp)`."""
        return self.dense["fsdp"] if self.sizes.dp_replicate == 1 else self.dense["dp_replicate", "fsdp"]

    @property
    def expert_sharding(self) -> DeviceMesh:
        """The mesh FSDP2 shards this rank's experts over, `(efsdp,)` or `(dp_replicate, efsdp)`."""
        assert self.experts is not None
        return self.experts["efsdp"] if self.sizes.dp_replicate == 1 else self.experts["dp_replicate", "efsdp"]

    @property
    def num_gradients(self) -> int:
        """Gradients that FSDP2 averages: those of ranks with different tokens."""
        return self.sizes.dp_replicate * self.sizes.fsdp

    @property
    def data(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model and other rows."""
        return self.group("dp")

    @property
    def layout(self) -> Mapping[str, int]:
        """Ranks along each axis."""
        return asdict(self.sizes)

    def seed(self, seed: int) -> None:
        """Seed torch's generators, alike on the ranks that share rows."""
        torch.manual_seed(seed + self.on("dp"))

    def rng_state(self) -> dict[str, Any]:
        """State of torch's generators."""
        return self.kind.rng_state()

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `rng_state` returned."""
        self.kind.set_rng_state(state)

    def leave(self) -> None:
        """Leave the groups, and free their threads and connections."""
        dist.destroy_process_group()
        # DTensor's caches keep the meshes, which would keep their groups, each with a thread that polls
        for mesh in (self.axes, self.dense, self.experts):
            if mesh is not None:
                mesh._pg_registry.clear()


_known: dict[tuple[object, ...], list[str]] = {}
"""Names of the groups of each mesh that DTensor's caches may hold, by the world's size, its ranks and its axes."""


def _recall(*meshes: DeviceMesh | None) -> None:
    """Use what DTensor has cached with meshes of earlier models of this process, if it holds for these.

    A cached result has the earlier mesh, which finds its groups by their names. It holds for an equal mesh whose groups
    have these names. Where any of these or of their parts has others, everything is forgotten.
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for part in chain.from_iterable(_parts(mesh) for mesh in meshes if mesh is not None):
        ranks = part.mesh
        known_by = (dist.get_world_size(), tuple(ranks.flatten().tolist()), ranks.shape, part.mesh_dim_names)
        found[known_by] = [group.group_name for group in part.get_all_groups()]
    if any(_known.get(mesh, names) != names for mesh, names in found.items()):
        _forget_meshes()
    _known.update(found)


def _parts(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """The meshes of some of a mesh's axes over which tensors may be split: a stage of a pipeline has its own."""
    axes = (mesh.mesh_dim_names or ())[1:]
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):
            if chosen != ("dp_replicate",):
                yield mesh[chosen]


def _forget_meshes() -> None:
    """Clear what DTensor has cached by mesh."""
    _known.clear()
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _device_mesh(rendezvous: Rendezvous, sizes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh(rendezvous.kind.kernels, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _expert_mesh(rendezvous: Rendezvous, sizes: AxisSizes) -> DeviceMesh | None:
    if sizes.ep == 1:
        return None
    return _device_mesh(
        rendezvous,
        {
            "pp": sizes.pp,
            "dp_replicate": sizes.dp_replicate,
            "efsdp": sizes.fsdp // sizes.ep,
            "ep": sizes.ep * sizes.tp,
        },
    )


def _node_size(rendezvous: Rendezvous, everyone: dist.ProcessGroup) -> int:
    """Number of ranks on each node; that of all ranks if nodes have different numbers."""
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


def _ends(rank: int, sizes: AxisSizes, timeout: timedelta) -> dist.ProcessGroup | None:
    found = None
    stride = sizes.dp * sizes.cp * sizes.tp
    for column in range(stride if sizes.pp > 1 else 0):
        ranks = [column, column + (sizes.pp - 1) * stride]
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            found = group
    return found


def _edges(rank: int, sizes: AxisSizes, timeout: timedelta) -> dict[tuple[Direction, int], dist.ProcessGroup]:
    """A group per sender and direction: one for both directions could wait in opposite orders at its two ends."""
    edges = {}
    stride = sizes.dp * sizes.cp * sizes.tp
    steps: dict[Direction, int] = {"forward": 1, "backward": -1}
    for column in range(stride if sizes.pp > 1 else 0):
        for sender in range(sizes.pp):
            for direction, step in steps.items():
                receiver = (sender + step) % sizes.pp
                ranks = sorted(column + place * stride for place in (sender, receiver))
                group = dist.new_group(ranks, timeout=timeout)
                if rank % stride == column:
                    edges[direction, sender] = group
    return edges
