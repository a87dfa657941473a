"""Arrays of the host on their way to the compute device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Each array starts at a multiple of this number of bytes in the common buffer; every dtype can be read there."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on a device, by one copy for which the host does not wait.

    The copy starts in pinned memory if the device is a GPU, on its current stream. The tensors share one storage and
    are otherwise independent of one another and of the arrays.

    Args:
        arrays: Arrays of booleans and numbers, of any shapes.
        device: Device of the tensors.
    """
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    if device.type == "cuda":
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = buffer.numpy()
    else:
        # In this order, tensors without data can be made of it, too.
        host = np.empty(max(size, ALIGNMENT), np.uint8)
        buffer = torch.from_numpy(host)
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = buffer.to(device, non_blocking=True)
    parts = []
    for array, start in zip(arrays, starts, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        part = moved[start : start + array.nbytes].view(dtype).view(array.shape)
        # A view shares the count of changes in place, so that autograd would take a change of one array for a change
        # of all.
        parts.append(part.data)
    return parts
