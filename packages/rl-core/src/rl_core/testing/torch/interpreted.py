"""Triton's interpreter in a process of tests."""

from __future__ import annotations

import os
import sys

from rl_core.selfcheck.rank_pool import Rank


def interpret_kernels(rank: Rank) -> None:
    """Make this process run Triton kernels on the CPU, in the interpreter, from here on.

    Triton is imported anew: it decides for each function when that is defined. To be called before anything else in a
    process that runs no other kernels.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        del sys.modules[name]
