"""Work inside a rank of a pool that joins a mesh and leaves it."""

from collections.abc import Mapping

from rl_core.selfcheck.rank_pool import Rank
from rl_megatron.config import MegatronConfig
from rl_megatron.parallel.mesh import MegatronMesh


def layout_of(rank: Rank, settings: Mapping[str, int]) -> dict[str, int]:
    """The layout of a mesh with these settings."""
    mesh = MegatronMesh.join(rank.rendezvous, MegatronConfig(**settings))
    found = dict(mesh.layout)
    mesh.leave()
    return found
