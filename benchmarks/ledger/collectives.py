"""Collectives by name, group and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

from ledger.costs import Collective, Traffic
from ledger.operations import num_bytes, tensors_in

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather", "scatter", "reduce")
"""Names of collectives, each before those that it contains."""
SENT = ("send", "recv")
_SPELLINGS = {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}


def collective_of(operation: Any, args: Sequence[Any], out: Any) -> tuple[Collective, Traffic] | None:
    """Return an operation's collective and the bytes that it moves; None if it is not one, or its group has one rank.

    Args:
        operation: An overload, of `torch.distributed` or of functional collectives.
        args: Positional arguments.
        out: Result.
    """
    if operation not in collective_ops or operation in sync_ops:
        return None
    ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(operation, args))
    if len(ranks) == 1:
        return None
    sides = [sum(map(num_bytes, tensors_in(side))) for side in (*args, out)]
    kind = Collective(_name(operation.__name__), len(ranks), max(ranks) - min(ranks) + 1)
    return kind, Traffic(1, max(sides))


def _name(operation: str) -> str:
    for spelling, name in _SPELLINGS.items():
        operation = operation.replace(spelling, name)
    return next(name for name in (*NAMES, *SENT) if name in operation)
