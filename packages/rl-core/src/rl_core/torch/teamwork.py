"""Work of one rank, or of each, whose failure must not leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from rl_core.errors import RLError


def lead(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its failure is raised there, and as an `RLError` that repeats it elsewhere.

    Without it the others would sit in their next collective until its time-out.

    Args:
        group: all ranks, on a backend that reduces CPU tensors.
    """
    together(group, action if dist.get_rank(group) == 0 else _nothing)


def together(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action` on every rank; a failure is raised where it was, and as an `RLError` that repeats it elsewhere.

    Args:
        group: all ranks, on a backend that reduces CPU tensors.
    """
    world_size = dist.get_world_size(group)
    failed = torch.full((1,), world_size)
    told = ""
    try:
        action()
    except BaseException as error:
        failed.fill_(dist.get_rank(group))
        told = f"{type(error).__name__}: {error}"
        raise
    finally:
        dist.all_reduce(failed, op=dist.ReduceOp.MIN, group=group)
        first = int(failed.item())
        words = [told]
        if first < world_size:
            dist.broadcast_object_list(words, src=first, group=group)
    if first < world_size:
        raise RLError(f"rank {first} failed: {words[0]}")


def _nothing() -> None:
    return
