"""Triton programs of RMSNorm."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_forward(
    x: tl.tensor,
    addend: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    inverse: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    addend_stride: tl.tensor,
    eps: tl.tensor,
    HAS_ADDEND: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Normalise `ROWS` rows of `x`, or of `x + addend`, which is written to `total`.

    The inverse root mean square of each row goes to `inverse`. `COLUMNS` is a power of two that is not below `size`.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_column = columns < size
    mask = is_row[:, None] & is_column[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
    if HAS_ADDEND:
        added = tl.load(addend + rows[:, None] * addend_stride + columns[None, :], mask=mask, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + rows[:, None] * size + columns[None, :], values, mask=mask)
    wide = values.to(tl.float32)
    scale = tl.math.rsqrt(tl.sum(wide * wide, axis=1) / size + eps)
    tl.store(inverse + rows, scale, mask=is_row)
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32) + OFFSET
    normed = wide * scale[:, None]
    if ROUNDS_FIRST:
        normed = normed.to(values.dtype).to(tl.float32)
    result = normed * factor[None, :]
    tl.store(out + rows[:, None] * size + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward(
    grad: tl.tensor,
    by_total: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    inverse: tl.tensor,
    grad_x: tl.tensor,
    by_weight: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    grad_stride: tl.tensor,
    by_total_stride: tl.tensor,
    x_stride: tl.tensor,
    HAS_TOTAL: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Gradients by the rows that were normalised, plus those by their sum, and each program's part of the gradient by
    the weight, `[programs, size]`."""
    columns = tl.arange(0, COLUMNS)
    is_column = columns < size
    factor = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32) + OFFSET
    collected = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        is_row = rows < num_rows
        mask = is_row[:, None] & is_column[None, :]
        values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        given = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse + rows, mask=is_row, other=0.0)[:, None]
        normed = values.to(tl.float32) * scale
        weighted = given * factor[None, :]
        share = tl.sum(weighted * normed, axis=1) / size
        result = (weighted - normed * share[:, None]) * scale
        if HAS_TOTAL:
            passed = tl.load(by_total + rows[:, None] * by_total_stride + columns[None, :], mask=mask, other=0.0)
            result += passed.to(tl.float32)
        tl.store(grad_x + rows[:, None] * size + columns[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
        if NEEDS_WEIGHT:
            if ROUNDS_FIRST:
                normed = normed.to(values.dtype).to(tl.float32)
            collected += given * normed
    if NEEDS_WEIGHT:
        place = by_weight + tl.program_id(0).to(tl.int64) * size + columns
        tl.store(place, tl.sum(collected, axis=0), mask=is_column)


@triton.jit
def rms_norm_weight_gradient(
    grad: tl.tensor,
    x: tl.tensor,
    inverse: tl.tensor,
    by_weight: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    grad_stride: tl.tensor,
    x_stride: tl.tensor,
    ROUNDS_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A program's part of the gradient by some entries of the weight, `[programs, size]`: of rows that are too long for
    `rms_norm_backward` to collect it."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < size
    collected = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        is_row = rows < num_rows
        mask = is_row[:, None] & is_column[None, :]
        values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0)
        given = tl.load(grad + rows[:, None] * grad_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        normed = values.to(tl.float32) * tl.load(inverse + rows, mask=is_row, other=0.0)[:, None]
        if ROUNDS_FIRST:
            normed = normed.to(values.dtype).to(tl.float32)
        collected += given * normed
    place = by_weight + tl.program_id(0).to(tl.int64) * size + columns
    tl.store(place, tl.sum(collected, axis=0), mask=is_column)
