"""Run work on one rank, or on each, so that its failure reaches the others at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from rl_core.errors import PeerFailed

PATIENCE = timedelta(days=1)
"""Bound of the wait for a rank that works: rank 0 downloads a model of any size, or writes it to a slow disk, for
longer than a collective may take. Whoever called the ranks has its own bound for the whole call, which ends first;
the end of a rank's process is noticed at once."""


def on_rank0(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action` on rank 0; its failure is raised there, and as a `PeerFailed` elsewhere.

    Without it the others would sit in their next collective until its time-out.

    Args:
        group: All ranks, on gloo; its own time-out does not bound the action.
        action: Called on rank 0 only.
    """
    on_all_ranks(group, action if dist.get_rank(group) == 0 else _nothing)


def on_all_ranks(group: dist.ProcessGroup, action: Callable[[], None]) -> None:
    """Run `action` on every rank; a failure is raised on its rank, and on the others as a `PeerFailed`.

    Args:
        group: All ranks, on gloo; its own time-out does not bound the action.
        action: Called once on each rank.
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
        _lowest(failed, group)
        first = int(failed.item())
        words = [told]
        if first < world_size:
            dist.broadcast_object_list(words, group_src=first, group=group)
    if first < world_size:
        raise PeerFailed(f"rank {first} failed: {words[0]}")


def _lowest(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The minimum over the ranks, in place; those that are done wait for the others with patience."""
    options = dist.AllreduceOptions()
    options.reduceOp = cast("dist.ReduceOp", dist.ReduceOp.MIN)
    options.timeout = PATIENCE
    group.allreduce([value], options).wait()


def _nothing() -> None:
    return
