"""Operators of this project, counted by the code that runs them on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import DispatchKeySet, Tensor
from torch._C import DispatchKey
from triton.runtime import JITFunction

from ledger.costs import Costs, Work
from ledger.operations import num_bytes, tensors_in

NAMESPACE = "rl_core"
"""Namespace of the operators."""


def is_own(operation: Any) -> bool:
    """Return whether an operation is an operator of this project."""
    return isinstance(operation, torch._ops.OpOverload) and operation.namespace == NAMESPACE


def run_on_gpus(
    operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], count: Callable[[Costs], None]
) -> Any:
    """Run an operator as on a GPU with tensors without data, and return its result.

    Its operations of torch are seen by the modes that are entered. Its Triton programs are counted and not launched.
    Each is a kernel that touches every tensor that it is given once, and twice if the operator changes it in place.

    Args:
        operator: Operator of this project.
        args: Positional arguments.
        kwargs: Keyword arguments.
        count: Called with the costs of each program.
    """
    changed = {
        id(tensor)
        for argument, value in zip(operator._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    }

    def launch(_: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        count(Costs(other=Work(1, touched_bytes(tensors_in((given, options)), changed))))

    with patch.object(JITFunction, "run", launch):
        return operator.redispatch(DispatchKeySet(DispatchKey.CUDA), *args, **kwargs)


def touched_bytes(tensors: Sequence[Tensor], changed: frozenset[int] | set[int] = frozenset()) -> int:
    """Return the bytes that a program reads and writes.

    Args:
        tensors: Tensors that the program is given; each counts once.
        changed: Identities of tensors that it reads and writes.
    """
    each = {id(tensor): tensor for tensor in tensors}
    return sum(num_bytes(tensor) * (2 if key in changed else 1) for key, tensor in each.items())
