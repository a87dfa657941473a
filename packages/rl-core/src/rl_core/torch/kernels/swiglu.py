"""SwiGLU: `silu(gate) * up`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_core.torch.kernels.devices import dense_rows, operator, takes

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


def swiglu_of_halves(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return `silu(gate) * up`, `[..., features]`, of one tensor that holds both.

    Args:
        gate_up: `[..., 2 * features]`, the gate first. Its gradient is written to one tensor.
        weights: `[...]`, which multiply the rows of the result; None if rows have none.
    """
    if not takes(gate_up, weights):
        gate, up = gate_up.chunk(2, -1)
        gated = F.silu(gate) * up
        return gated if weights is None else (gated * weights[..., None]).to(gate_up.dtype)
    result: Tensor = _SwiGLUOfHalves.apply(gate_up, weights)
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out: Tensor = torch.ops.rl_core.swiglu(dense_rows(gate), dense_rows(up), None)
        return out.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        both, _ = torch.ops.rl_core.swiglu_backward(dense_rows(grad), dense_rows(gate), dense_rows(up), None, False)
        by_gate, by_up = (part.view(gate.shape) for part in both.unbind(0))
        return by_gate, by_up


class _SwiGLUOfHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        gate, up = dense_rows(gate_up).chunk(2, -1)
        out: Tensor = torch.ops.rl_core.swiglu(gate, up, None if weights is None else weights.reshape(-1))
        return out.view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up, weights = ctx.saved_tensors
        gate, up = dense_rows(gate_up).chunk(2, -1)
        flat = None if weights is None else weights.reshape(-1)
        both, parts = torch.ops.rl_core.swiglu_backward(dense_rows(grad), gate, up, flat, True)
        by_weights = None if weights is None else parts.sum(-1).to(weights.dtype).view(weights.shape)
        return both.view(gate_up.shape), by_weights


def _launch(num: int, size: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid of the programs, and what each computes."""
    block = min(BLOCK, max(16, 1 << (size - 1).bit_length()))
    num_blocks = -(-size // block)
    return (num * num_blocks,), {"num_blocks": num_blocks, "BLOCK": block, "num_warps": 4}


def _empty(gate: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


@operator("swiglu", _empty)
def _forward(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    from rl_core.torch.kernels.layer_programs import swiglu_forward

    out = _empty(gate)
    if out.numel():
        grid, shape = _launch(*gate.shape)
        strides = {"gate_stride": gate.stride(0), "up_stride": up.stride(0)}
        with torch.cuda.device_of(gate):
            swiglu_forward[grid](
                gate, up, weights, out, gate.shape[1], **strides, HAS_WEIGHTS=weights is not None, **shape
            )
    return out


def _backward_empty(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, in_one: bool
) -> tuple[Tensor, Tensor]:
    """Return gradients by gate and up, next to one another in each row or one tensor after the other; `[rows, blocks]`,
    the parts of the gradient by the weights."""
    num, size = gate.shape
    num_blocks = 0 if weights is None else _launch(num, size)[1]["num_blocks"]
    by_weights = gate.new_empty((num, num_blocks), dtype=torch.float32)
    return gate.new_empty((num, 2 * size) if in_one else (2, num, size)), by_weights


@operator("swiglu_backward", _backward_empty)
def _backward(grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, in_one: bool) -> tuple[Tensor, Tensor]:
    from rl_core.torch.kernels.layer_programs import swiglu_backward

    both, by_weights = _backward_empty(grad, gate, up, weights, in_one)
    by_gate, by_up = both.chunk(2, -1) if in_one else both.unbind(0)
    if both.numel():
        grid, shape = _launch(*gate.shape)
        strides = {"grad_stride": grad.stride(0), "gate_stride": gate.stride(0), "up_stride": up.stride(0)}
        options = {**strides, "by_stride": by_gate.stride(0), "HAS_WEIGHTS": weights is not None, **shape}
        with torch.cuda.device_of(gate):
            swiglu_backward[grid](grad, gate, up, weights, by_gate, by_up, by_weights, gate.shape[1], **options)
    return both, by_weights
