"""The dispatcher that a config chooses."""

from __future__ import annotations

from rl_dtensor.config import ExpertDispatcher
from rl_dtensor.parallel.all_to_all import AllToAll
from rl_dtensor.parallel.deep_ep import DeepEP
from rl_dtensor.parallel.dispatch import Dispatch
from rl_dtensor.parallel.mesh import Mesh


def dispatcher(choice: ExpertDispatcher, mesh: Mesh, hidden: int, *, fused: bool) -> Dispatch:
    """Return the transport of tokens to the experts of a mesh; collective.

    Args:
        choice: `dtensor_cfg.expert_dispatcher`.
        mesh: Mesh of the run, with expert parallelism.
        hidden: Width of hidden states.
        fused: False to index also where kernels run.

    Raises:
        ValueError: If its package cannot be imported.
    """
    if choice == "deep_ep":
        assert mesh.experts is not None
        return DeepEP(mesh.experts.get_group("ep"), hidden, fused=fused)
    return AllToAll(mesh.exchanges, fused=fused)
