"""SwiGLU: `silu(gate) * up`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_core.torch.kernels.devices import takes

BLOCK = 1024
"""Entries of a row that one program computes."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[..., features]`: two reads and one write on GPUs, and no rounding between.

    Args:
        gate: `[..., features]`.
        up: Same shape.
    """
    if not takes(gate, up) or gate.shape != up.shape or gate.dtype != up.dtype:
        return F.silu(gate) * up
    result: Tensor = _SwiGLU.apply(gate, up)
    return result


def swiglu_of_halves(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[..., features]`, of one tensor that holds both.

    Args:
        gate_up: `[..., 2 * features]`, the gate first. Its gradient is written to one tensor.
    """
    if not takes(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    result: Tensor = _SwiGLUOfHalves.apply(gate_up)
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out: Tensor = torch.ops.rl_core.swiglu(_rows(gate), _rows(up))
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        both = torch.ops.rl_core.swiglu_backward(_rows(grad), _rows(gate), _rows(up), False)
        by_gate, by_up = (part.view(gate.shape) for part in both.unbind(0))
        return by_gate, by_up


class _SwiGLUOfHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = _rows(gate_up).chunk(2, -1)
        out: Tensor = torch.ops.rl_core.swiglu(gate, up)
        return out.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = _rows(gate_up).chunk(2, -1)
        both: Tensor = torch.ops.rl_core.swiglu_backward(_rows(grad), gate, up, True)
        return both.view(gate_up.shape)


def _rows(x: Tensor) -> Tensor:
    """`[rows, features]`, whose features lie next to one another."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _launch(num: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid of the programs, and what each computes."""
    block = min(BLOCK, max(16, 1 << (size - 1).bit_length()))
    num_blocks = -(-size // block)
    return (num * num_blocks,), {"num_blocks": num_blocks, "BLOCK": block, "num_warps": 4}


@torch.library.custom_op("rl_core::swiglu", mutates_args=(), device_types=("cpu", "cuda"))
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    from rl_core.torch.kernels.programs.swiglu import swiglu_forward

    out = _empty(gate, up)
    if out.numel():
        grid, shape = _launch(*gate.shape)
        with torch.cuda.device_of(gate):
            swiglu_forward[grid](
                gate, up, out, gate.shape[1], gate_stride=gate.stride(0), up_stride=up.stride(0), **shape
            )
    return out


@_forward.register_fake
def _empty(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("rl_core::swiglu_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _backward(grad: Tensor, gate: Tensor, up: Tensor, in_one: bool) -> Tensor:
    from rl_core.torch.kernels.programs.swiglu import swiglu_backward

    both = _backward_empty(grad, gate, up, in_one)
    by_gate, by_up = both.chunk(2, -1) if in_one else both.unbind(0)
    if both.numel():
        grid, shape = _launch(*gate.shape)
        with torch.cuda.device_of(gate):
            swiglu_backward[grid](
                grad,
                gate,
                up,
                by_gate,
                by_up,
                gate.shape[1],
                grad_stride=grad.stride(0),
                gate_stride=gate.stride(0),
                up_stride=up.stride(0),
                by_stride=by_gate.stride(0),
                **shape,
            )
    return both


@_backward.register_fake
def _backward_empty(grad: Tensor, gate: Tensor, up: Tensor, in_one: bool) -> Tensor:
    """Gradients by gate and up: next to one another in each row, or one tensor after the other."""
    num, size = gate.shape
    return gate.new_empty((num, 2 * size) if in_one else (2, num, size))
