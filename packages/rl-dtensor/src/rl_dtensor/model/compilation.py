"""Layers compiled by `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

MOST_VARIANTS = 64
"""Maximum number of variants of the code of one kind of layer: with and without gradients and dropout, for each kind of
attention in it."""


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Make the layers of a model run compiled code, made when they first run; to be called before they are
    sharded, so that gathering stays outside of it.

    Lengths are symbols in the compiled code: it is not made again for rows of other lengths. Attention between rows'
    bounds, which are numbers that change with every microbatch, runs as it is.

    Raises:
        ValueError: If nothing can be compiled on this machine.
    """
    problem = compiler_problem()
    if problem:
        raise ValueError(problem)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


@cache
def compiler_problem() -> str:
    """Why nothing can be compiled on this machine, found out by compiling a sum; empty if it can be."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(_sum)(torch.ones(2, device=device))
    except Exception as error:  # noqa: BLE001  # whatever compilers and drivers say
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return (
            "dtensor_cfg.compile needs a C++ compiler that works, and compiling a sum gave "
            f"{type(error).__name__}: {lines[0] if lines else 'no reason'}; install g++ (or set CXX), or set "
            "compile=false"
        )
    return ""


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x + x
