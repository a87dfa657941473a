"""Shared experts that compute while tokens are on their way to the others."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

NAMES = ("shared_expert", "shared_experts")
"""Names that families have for the experts of every token, next to those that a router chooses."""


class EarlyPart:
    """A part of a block that gets the same tokens as the block, and is computed ahead of the block's call of it.

    The call then takes the result. A block that calls the part first computes as it is written, and so does one whose
    part has hooks, such as those of tensor parallelism, which belong to the call.

    Args:
        part: Module that takes hidden states and nothing else, changed in place.
        block: Module that calls it at most once in each of its own calls, changed in place.
    """

    def __init__(self, part: Any, block: nn.Module) -> None:
        self._part = part
        self._original = part.forward
        self._entered: Tensor | None = None
        self._early: tuple[Tensor, int, Tensor] | None = None
        part.forward = self._forward
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave, always_call=True)

    def compute(self) -> None:
        """Compute the part of the tokens that entered the block, unless the block has called it."""
        hidden = self._entered
        if hidden is not None and not self._part._forward_pre_hooks and not self._part._forward_hooks:
            self._early = hidden, hidden._version, self._original(hidden)

    def _forward(self, x: Tensor) -> Tensor:
        early, self._early, self._entered = self._early, None, None
        if early is not None and _is_same(early[0], x) and early[0]._version == early[1]:
            return early[2].view(*x.shape[:-1], -1)
        out: Tensor = self._original(x)
        return out

    def _enter(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        self._entered, self._early = first if isinstance(first, Tensor) else None, None

    def _leave(self, *_: Any) -> None:
        self._entered, self._early = None, None


def early_part(block: nn.Module) -> EarlyPart | None:
    """Make the shared experts of a block ready to be computed early; None if there are none that can be.

    Args:
        block: Module with experts, changed in place.
    """
    shared = [part for name, part in block.named_children() if name in NAMES]
    if len(shared) != 1 or len(inspect.signature(shared[0].forward).parameters) != 1:
        return None
    return EarlyPart(shared[0], block)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same values in the same memory, whatever their shapes."""
    is_dense = one.is_contiguous() and other.is_contiguous() and one.numel() == other.numel()
    is_there = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_dense and is_there and one.storage_offset() == other.storage_offset() and one.dtype == other.dtype
