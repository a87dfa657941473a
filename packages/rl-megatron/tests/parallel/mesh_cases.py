"""Work inside a rank of a pool that joins a mesh and leaves it."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_core.selfcheck.rank_pool import Rank
from rl_megatron.config import MegatronConfig
from rl_megatron.parallel.mesh import MegatronMesh


def layout_of(rank: Rank, settings: Mapping[str, int]) -> dict[str, int]:
    """The layout of a mesh with these settings."""
    mesh = MegatronMesh.join(rank.rendezvous, MegatronConfig(**settings))
    found = dict(mesh.layout)
    mesh.leave()
    return found


def groups_of(rank: Rank, settings: Mapping[str, int]) -> tuple[list[tuple[int, ...]], bool, bool, int]:
    """The ranks of each group of this rank with others, whether groups of rows with and without context parallelism are
    one and those of experts another, and a sum over the rows' group of a tensor of the host."""
    mesh = MegatronMesh.join(rank.rendezvous, MegatronConfig(**settings))
    groups = dist.distributed_c10d._world.pg_group_ranks.values()
    found = sorted(tuple(ranks) for ranks in groups if len(ranks) > 1)
    rows = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    total = torch.tensor(rank.rendezvous.rank)
    dist.all_reduce(total, group=mesh.data)
    dist.barrier()
    mesh.leave()
    return found, rows is mesh.data, experts is not mesh.data, int(total)
