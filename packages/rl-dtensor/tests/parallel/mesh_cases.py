"""Work inside a rank of a pool that joins a mesh and leaves it."""

from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _get_fast_path_sharding_prop_cache_stats

from rl_core.model import Rendezvous
from rl_core.selfcheck.rank_pool import Rank
from rl_core.torch.process_group import join_process_group
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel import mesh


def fail_half_way(rank: Rank) -> tuple[str, bool]:
    """Join while the last groups cannot be made; the error, and whether this process is in a group afterwards."""
    try:
        with mock.patch.object(mesh, "_pipeline_groups", side_effect=OSError("too many open files")):
            mesh.DTensorMesh.join(rank.rendezvous, DTensorConfig())
    except OSError as error:
        return str(error), dist.is_initialized()
    raise AssertionError("joined")


def join(rank: Rank) -> int:
    """Join and leave; the size of the data-parallel axis."""
    joined = mesh.DTensorMesh.join(rank.rendezvous, DTensorConfig())
    size = joined.coordinates.along("dp")
    # the first rank's process has the store, over which the other may still be joining
    dist.barrier()
    joined.leave()
    return size


def add_up(rank: Rank, expert_parallel_size: int, num_groups: int) -> tuple[float, int]:
    """Add up a tensor that is split over all ranks.

    Args:
        num_groups: Groups that are made before those of the mesh, which then have other names.

    Returns:
        The sum, and how often DTensor worked out the placement of a result.
    """
    with mock.patch.object(mesh, "join_process_group", partial(_join_and_make, num_groups=num_groups)):
        joined = mesh.DTensorMesh.join(rank.rendezvous, DTensorConfig(expert_parallel_size=expert_parallel_size))
    _, before = _get_fast_path_sharding_prop_cache_stats()
    part = torch.full((3,), 1.0 + rank.rendezvous.rank)
    total = DTensor.from_local(part, joined.dense["fsdp"], [Shard(0)]).sum().full_tensor()
    _, after = _get_fast_path_sharding_prop_cache_stats()
    dist.barrier()
    joined.leave()
    return float(total), after - before


def _join_and_make(rendezvous: Rendezvous, num_groups: int) -> None:
    join_process_group(rendezvous)
    for _ in range(num_groups):
        dist.new_group()


def exchange_groups(rank: Rank, node_size: int) -> list[list[int]]:
    """Ranks of the groups through which tokens of this rank reach experts of four, on nodes of a size."""
    rendezvous = replace(rank.rendezvous, local_rank=rank.rendezvous.rank % node_size)
    joined = mesh.DTensorMesh.join(rendezvous, DTensorConfig(expert_parallel_size=2, tensor_parallel_size=2))
    groups = [dist.get_process_group_ranks(group) for group in joined.exchanges]
    dist.barrier()
    joined.leave()
    return groups
