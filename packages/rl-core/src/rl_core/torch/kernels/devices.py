"""Devices that run the kernels, how many programs fill one, and the operators by which kernels are called."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("rl_core", "FRAGMENT")

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that the kernels take; they compute in float32."""

PROGRAMS_PER_PROCESSOR = 8
"""Programs that share one multiprocessor, of kernels whose programs loop over rows. On an H100 rotations were fastest
with 8, and norms no slower than with any other number."""

COUNTED_PROCESSORS = 132
"""Multiprocessors of the device whose work is counted on tensors without data: an H100 or H200."""

_counts = False  # Compilers read a variable of a module, and no `ContextVar`.


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Have tensors without data take the kernels' path on every device, so that what a GPU would do can be counted."""
    global _counts
    before, _counts = _counts, True
    try:
        yield
    finally:
        _counts = before


def runs_kernels(device: torch.device) -> bool:
    """Return whether fused layers run as Triton kernels on a device: on GPUs, if Triton is installed and starts.

    Meta tensors take the same path, so that what a GPU would do can be counted. A CPU runs the kernels only in Triton's
    interpreter, which `TRITON_INTERPRET=1` turns on for a process that has not imported Triton yet.

    `torch.compile` takes the answer for a constant.
    """
    return (_counts and device.type == "cpu") or _launches(device.type)


def takes(*tensors: Tensor | None) -> bool:
    """Return whether the kernels run where these tensors are, and take their dtypes.

    Args:
        *tensors: Tensors of one device; None is passed over.
    """
    return all(tensor is None or (tensor.dtype in DTYPES and runs_kernels(tensor.device)) for tensor in tensors)


@torch.compiler.assume_constant_result
def _launches(kind: str) -> bool:
    if kind == "cpu":
        return is_interpreted()
    if kind not in ("cuda", "meta") or not _has_triton():
        return False
    return kind == "meta" or _starts()


def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels of this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def num_programs(device: torch.device, num_items: int) -> int:
    """Return the number of programs that share some items, each looping over its own: enough to fill the device.

    Args:
        device: Device that runs them.
        num_items: Number of items; no program is without one.
    """
    limit = 2
    if device.type == "cuda":
        limit = PROGRAMS_PER_PROCESSOR * _properties(device).multi_processor_count
    elif device.type == "meta" or _counts:
        limit = PROGRAMS_PER_PROCESSOR * COUNTED_PROCESSORS
    return max(1, min(limit, num_items))


_properties = cache(torch.cuda.get_device_properties)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _starts() -> bool:
    """Return whether Triton starts on this machine's GPU; it compiles the module that loads kernels.

    Without a GPU, tensors have no data, and nothing needs to start.
    """
    if not torch.cuda.is_available():
        return True
    try:
        driver = importlib.import_module("triton.runtime.driver")
        return driver.driver.active.utils is not None
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        logger.warning(
            "layers are not fused, because Triton does not start (%s: %s); it needs a C compiler and the headers of "
            "Python: install gcc or set CC",
            type(error).__name__,
            error,
        )
        return False


def dense(x: Tensor) -> Tensor:
    """Return the same values, with the entries of the last dim next to one another in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_rows(x: Tensor) -> Tensor:
    """Return `[rows, features]`, with the features of a row next to one another in memory."""
    return dense(x.reshape(-1, x.shape[-1]))


def operator(name: str, fake: Callable[..., Any]) -> Callable[[_F], _F]:
    """Make the decorated function the operator `torch.ops.rl_core.NAME`, which has no own gradient and returns new
    tensors.

    torch's modes, fake tensors and compilers see it by name. `torch.library.custom_op` makes operators too, and spends
    twice the time of the host on each call: on its own kernels for gradients, and on a look for results that share
    memory with arguments. The kernels are called in every layer, by functions that know their gradients, so they are
    registered with the dispatcher directly.

    Args:
        name: Name of the operator, which the function computes on a CPU and on GPUs; its annotations are the schema.
        fake: Function that returns results without data, for tensors without data.
    """

    def register(function: _F) -> _F:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"rl_core::{name}", fake, lib=_LIBRARY)
        return function

    return register
