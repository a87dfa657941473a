"""Triton's interpreter in a process of tests."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np
import torch

from rl_core.selfcheck.rank_pool import Rank

FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def interpret_kernels(rank: Rank) -> None:
    """Make this process run Triton kernels on the CPU, in the interpreter, from here on.

    Triton is imported anew: it decides for each function when that is defined. To be called before anything else in a
    process that runs no other kernels.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        # a module in C cannot be imported twice
        if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    # the interpreter of Triton 3.7 cuts bits off, and GPUs round to the nearest value
    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source.name == "fp32" and target.name in FLOAT8:
            return torch.from_numpy(values.copy()).to(FLOAT8[target.name]).view(torch.uint8).numpy()
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        bits = values.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    interpreter._convert_float = rounded
