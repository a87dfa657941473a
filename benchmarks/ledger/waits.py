"""Operations whose result the host waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ledger.operations import tensors_in

_aten = torch.ops.aten

WAITING: Mapping[Any, int] = {
    _aten._local_scalar_dense: 1,
    _aten._unique2: 1,
    _aten.bincount: 2,
    _aten.equal: 1,
    _aten.masked_select: 1,
    _aten.nonzero: 1,
    _aten.unique_consecutive: 1,
    _aten.unique_dim: 1,
}
"""Operations that wait for numbers on the device, such as the size of their result, and how often: `bincount` for the
smallest and the largest number."""

REPEAT_WAITS = 2
"""Waits of `repeat_interleave` that is not given the size of its result: for the sum of the repeats and their sign."""

TO_HOST, TO_DEVICE = "copy to host", "copy to device"

_PERHAPS = frozenset({_aten.repeat_interleave, _aten.index, _aten.index_put, _aten.index_put_})
"""Operations that wait for some arguments."""

COPIES = frozenset({_aten._to_copy, _aten.copy_})
"""Operations that may copy from one device to another."""


def waits_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: str) -> dict[str, int]:
    """Return the number of times that an operation makes the host wait for the device, by cause, as
    `torch.cuda.set_sync_debug_mode` reports it.

    A copy between host and device waits unless it is told not to (`non_blocking`).

    Args:
        operation: An overload.
        args: Positional arguments.
        kwargs: Keyword arguments.
        out: Result.
        device: Type of the device; tensors on others are the host's.
    """
    if not isinstance(operation, torch._ops.OpOverload):
        return {}
    packet = operation._overloadpacket
    if packet in COPIES:
        return _of_copy(packet, args, kwargs, out, device)
    if packet not in WAITING and packet not in _PERHAPS:
        return {}
    if not any(tensor.device.type == device for tensor in tensors_in((args, kwargs))):
        return {}
    if packet in WAITING:
        return {packet.__name__.strip("_"): WAITING[packet]}
    if operation is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return {"repeat_interleave": REPEAT_WAITS}
    if packet is _aten.repeat_interleave:
        return {}
    masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return {"index by a mask": len(masks)} if masks else {}


def crosses(operation: Any, args: Sequence[Any], out: Any) -> bool:
    """Return whether an operation copies from a device to another."""
    if not isinstance(operation, torch._ops.OpOverload) or operation._overloadpacket not in COPIES:
        return False
    source, target = _ends(operation._overloadpacket, args, out)
    return source.device.type != target.device.type


def _of_copy(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, device: str) -> dict[str, int]:
    source, target = _ends(packet, args, out)
    if source.device.type == target.device.type or device not in (source.device.type, target.device.type):
        return {}
    is_free = kwargs.get("non_blocking", args[2] if packet is _aten.copy_ and len(args) > 2 else False)
    if is_free:
        return {}
    return {TO_HOST if source.device.type == device else TO_DEVICE: 1}


def _ends(packet: Any, args: Sequence[Any], out: Any) -> tuple[Tensor, Tensor]:
    """Return the source and target of a copy."""
    return (args[1], args[0]) if packet is _aten.copy_ else (args[0], out)
