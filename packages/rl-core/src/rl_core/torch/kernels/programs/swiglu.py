"""Triton programs of SwiGLU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    num_blocks: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`silu(gate) * up` of a block of one row, times the weight of the row if rows have weights."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    result = x * tl.sigmoid(x) * y
    if HAS_WEIGHTS:
        result *= tl.load(weights + row).to(tl.float32)
    tl.store(out + row * size + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    by_gate: tl.tensor,
    by_up: tl.tensor,
    by_weights: tl.tensor,
    size: tl.tensor,
    num_blocks: tl.tensor,
    grad_stride: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    by_stride: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gradients by the gate and by what it multiplies, of a block of one row; the block's part of that by the weight of
    the row."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    columns = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    given = tl.load(grad + row * grad_stride + columns, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(x)
    if HAS_WEIGHTS:
        tl.store(by_weights + tl.program_id(0), tl.sum(given * x * share * y, 0))
        given *= tl.load(weights + row).to(tl.float32)
    by_x = given * y * share * (1.0 + x * (1.0 - share))
    by_y = given * x * share
    tl.store(by_gate + row * by_stride + columns, by_x.to(by_gate.dtype.element_ty), mask=mask)
    tl.store(by_up + row * by_stride + columns, by_y.to(by_up.dtype.element_ty), mask=mask)
