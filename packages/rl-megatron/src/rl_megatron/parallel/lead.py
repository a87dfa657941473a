"""Work that the first rank does alone while the others wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from rl_core.errors import RLError
from rl_megatron.parallel.mesh import Mesh


def lead(mesh: Mesh, action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its failure is raised there and ends the wait of the others with an `RLError`.

    Without it the others would sit in their next collective until its time-out.
    """
    done = torch.zeros(1)
    try:
        if mesh.rank == 0:
            action()
            done += 1
    finally:
        dist.broadcast(done, src=0, group=mesh.control)
    if not done:
        raise RLError("rank 0 failed; see its error")
