"""Work of one rank, or of each, whose failure must not leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from rl_core.errors import RLError
from rl_dtensor.parallel.mesh import Mesh


def lead(mesh: Mesh, action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its failure is raised there and ends the wait of the others with an `RLError`.

    Without it the others would sit in their next collective until its time-out.
    """
    together(mesh, action if mesh.rank == 0 else _nothing)


def together(mesh: Mesh, action: Callable[[], None]) -> None:
    """Run `action` on every rank; a failure is raised where it was, and as an `RLError` that repeats it elsewhere."""
    failed = torch.full((1,), mesh.world_size)
    told = ""
    try:
        action()
    except BaseException as error:
        failed.fill_(mesh.rank)
        told = f"{type(error).__name__}: {error}"
        raise
    finally:
        dist.all_reduce(failed, op=dist.ReduceOp.MIN, group=mesh.control)
        first = int(failed.item())
        words = [told]
        if first < mesh.world_size:
            dist.broadcast_object_list(words, src=first, group=mesh.control)
    if first < mesh.world_size:
        raise RLError(f"rank {first} failed: {words[0]}")


def _nothing() -> None:
    return
