"""Digests of tensors, computed on the device that holds the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_core.torch.kernels.devices import num_programs, operator, runs_kernels

LANE_BYTES = 8
HOST_CHUNK, DEVICE_CHUNK = 2**14, 2**24
"""Lanes mixed at a time: as many as a core's cache holds, and enough to keep a GPU without Triton busy in little
memory."""
BLOCK = 1024
"""Lanes that a program mixes at a time."""


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bytes in row-major order, equal on every device for equal bytes.

    The bytes are read as 64-bit lanes, each mixed with a key of its position by invertible steps (as in splitmix64,
    with arithmetic shifts), and summed modulo 2^64, so that integer sums on the device give the same answer in any
    order and 8 bytes reach the host. It catches accidents (a changed byte, swapped values, zeros in place of data), not
    an adversary.

    Args:
        tensor: Tensor of any dtype and shape; the shape and dtype themselves are not part of the digest, the number of
            bytes is.
    """
    (found,) = read_digests([begin_digest(tensor)])
    return found


class PendingDigest(NamedTuple):
    """A digest that the tensor's device is computing.

    Args:
        num_bytes: Number of bytes of the tensor.
        total: The mixed sum; int64 on the device, or a number if it was taken on the host.
    """

    num_bytes: int
    total: Tensor | int


def begin_digest(tensor: Tensor) -> PendingDigest:
    """Compute the digest on the tensor's device, without waiting; the tensor may be changed afterwards in the same
    stream.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_bytes = flat.numel()
    whole = num_bytes // LANE_BYTES * LANE_BYTES
    body = flat[:whole]
    if body.storage_offset() % LANE_BYTES:
        body = body.clone()
    total = _mixed_sum(body.view(torch.int64), 0)
    if whole < num_bytes:
        tail = torch.zeros(LANE_BYTES, dtype=torch.uint8, device=flat.device)
        tail[: num_bytes - whole] = flat[whole:]
        total += _mixed_sum(tail.view(torch.int64), whole // LANE_BYTES)
    return PendingDigest(num_bytes, total)


def read_digests(pending: Sequence[PendingDigest]) -> list[str]:
    """Return the digests, with one wait for the device for all of them."""
    waiting = [found.total for found in pending if isinstance(found.total, Tensor)]
    read = iter(torch.stack(waiting).tolist() if waiting else [])
    totals = [next(read) if isinstance(found.total, Tensor) else found.total for found in pending]
    return [f"{found.num_bytes:x}-{total % 2**64:016x}" for found, total in zip(pending, totals, strict=True)]


def _mixed_sum(lanes: Tensor, start: int) -> Tensor | int:
    """Return the sum of the mixed lanes at positions `start`, `start + 1`, ..., except multiples of 2^64."""
    if lanes.device.type == "cpu":
        # After `numpy()` torch would not release the memory.
        return _host_sum(np.from_dlpack(lanes), start)
    if runs_kernels(lanes.device):
        sums: Tensor = torch.ops.rl_core.mixed_sums(lanes, start)
        return sums.sum()
    return _device_sum(lanes, start)


def _sums_empty(lanes: Tensor, start: int) -> Tensor:
    return lanes.new_empty(num_programs(lanes.device, -(-len(lanes) // BLOCK)))


@operator("mixed_sums", _sums_empty)
def _sums(lanes: Tensor, start: int) -> Tensor:
    """Return parts of `_mixed_sum`, int64: one read of the lanes."""
    from rl_core.torch.kernels.byte_programs import mixed_sums

    sums = _sums_empty(lanes, start)
    options = {"KEY": KEY, "FIRST": FIRST, "SECOND": SECOND, "BLOCK": BLOCK, "num_warps": 8}
    with torch.cuda.device_of(lanes):
        mixed_sums[(len(sums),)](lanes, sums, len(lanes), start, **options)
    return sums


def _device_sum(lanes: Tensor, start: int) -> Tensor:
    """`_mixed_sum` on the device of the lanes by operations of torch, int64."""
    size = min(DEVICE_CHUNK, len(lanes))
    keys = torch.arange(start, start + size, dtype=torch.int64, device=lanes.device).add_(1).mul_(KEY)
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    for chunk in lanes.split(size) if size else ():
        mixed = chunk ^ keys[: len(chunk)]
        mixed.bitwise_xor_(mixed >> 30).mul_(FIRST)
        mixed.bitwise_xor_(mixed >> 27).mul_(SECOND)
        total += mixed.bitwise_xor_(mixed >> 31).sum()
        keys += _signed(size * KEY)
    return total


def _host_sum(lanes: np.ndarray, start: int) -> int:
    """`_mixed_sum` of lanes on the host: NumPy takes half the time of torch for small ones, and less for all."""
    size = min(HOST_CHUNK, len(lanes))
    keys = np.arange(start + 1, start + 1 + size, dtype=np.int64) * np.int64(KEY)
    mixed, shifted = np.empty_like(keys), np.empty_like(keys)
    total = 0
    for first in range(0, len(lanes), size or 1):
        chunk = lanes[first : first + size]
        out, moved = mixed[: len(chunk)], shifted[: len(chunk)]
        np.bitwise_xor(chunk, keys[: len(chunk)], out=out)
        for distance, factor in ((30, FIRST), (27, SECOND), (31, 1)):
            np.right_shift(out, distance, out=moved)
            np.bitwise_xor(out, moved, out=out)
            if factor != 1:
                np.multiply(out, np.int64(factor), out=out)
        total += int(out.sum())
        keys += np.int64(_signed(size * KEY))
    return total


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


KEY = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)
