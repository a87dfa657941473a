"""Operators of the kernels: torch's modes, fake tensors and compilers see them by name.

`torch.library.custom_op` makes operators too, and spends twice the time of the host on each call: on its own kernels
for gradients, and on a look for results that share memory with arguments. The kernels are called in every layer, by
functions that know their gradients, so theirs are registered with the dispatcher directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("rl_core", "FRAGMENT")


class Operator:
    """The operator `torch.ops.rl_core.NAME`, which has no gradient of its own and returns new tensors.

    Args:
        name: Name of the operator.
        function: Computes it on a CPU and on GPUs; its annotations are the schema.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)

    def register_fake(self, function: _F) -> _F:
        """Make a function the shape of the results, for tensors without data."""
        torch.library.register_fake(f"rl_core::{self._name}", function, lib=_LIBRARY)
        return function


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make the decorated function an `Operator`."""
    return lambda function: Operator(name, function)
