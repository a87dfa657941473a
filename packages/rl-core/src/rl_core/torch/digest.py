"""Digests of tensors, taken where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

LANE_BYTES = 8
CHUNK_LANES = {"cpu": 2**15, "cuda": 2**24}
"""Lanes mixed at a time: what a core's cache holds, and what keeps a GPU busy in little memory."""


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's bytes in row-major order, equal on every device for equal bytes.

    The bytes are read as 64-bit lanes, each mixed with a key of its position by invertible steps, and summed modulo
    2^64, so that integer sums on the device give the same answer in any order and 8 bytes reach the host. It catches
    accidents (a changed byte, swapped values, zeros in place of data), not an adversary.

    Args:
        tensor: of any dtype and shape; the shape and dtype themselves are not part of the digest, the number of
            bytes is.
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
    return f"{num_bytes:x}-{total.item() % 2**64:016x}"


def _mixed_sum(lanes: Tensor, start: int) -> Tensor:
    """int64 scalar, the sum of the mixed lanes at positions `start`, `start + 1`, ..."""
    size = min(CHUNK_LANES[lanes.device.type], len(lanes))
    keys = torch.arange(start, start + size, dtype=torch.int64, device=lanes.device).add_(1).mul_(KEY)
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    for chunk in lanes.split(size) if size else ():
        total += _mixed(chunk, keys[: len(chunk)]).sum()
        keys += _signed(size * KEY)
    return total


def _mixed(lanes: Tensor, keys: Tensor) -> Tensor:
    """The lanes after steps that keep different ones different (those of splitmix64, with arithmetic shifts)."""
    mixed = lanes ^ keys
    mixed.bitwise_xor_(mixed >> 30).mul_(FIRST)
    mixed.bitwise_xor_(mixed >> 27).mul_(SECOND)
    return mixed.bitwise_xor_(mixed >> 31)


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


KEY = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)
