"""Work inside a rank of a pool that joins a mesh and leaves it."""

from dataclasses import replace
from unittest import mock

import torch.distributed as dist

from rl_core.selfcheck.rank_pool import Rank
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel import mesh


def fail_half_way(rank: Rank) -> tuple[str, bool]:
    """Join while the last groups cannot be made; the error, and whether this process is in a group afterwards."""
    try:
        with mock.patch.object(mesh, "_edges", side_effect=OSError("too many open files")):
            mesh.Mesh.join(rank.rendezvous, DTensorConfig())
    except OSError as error:
        return str(error), dist.is_initialized()
    raise AssertionError("joined")


def join(rank: Rank) -> int:
    """Join and leave; the size of the data-parallel axis."""
    joined = mesh.Mesh.join(rank.rendezvous, DTensorConfig())
    size = joined.coordinates.along("dp")
    # the first rank's process has the store, over which the other may still be joining
    dist.barrier()
    joined.leave()
    return size


def exchange_groups(rank: Rank, node_size: int) -> list[list[int]]:
    """Ranks of the groups through which tokens of this rank reach experts of four, on nodes of a size."""
    rendezvous = replace(rank.rendezvous, local_rank=rank.rendezvous.rank % node_size)
    joined = mesh.Mesh.join(rendezvous, DTensorConfig(expert_parallel_size=2, tensor_parallel_size=2))
    groups = [dist.get_process_group_ranks(group) for group in joined.exchanges]
    dist.barrier()
    joined.leave()
    return groups
