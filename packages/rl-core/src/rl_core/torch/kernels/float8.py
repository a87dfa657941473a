"""Matrices rounded to 8 bits for products whose scales are measured in every pass, and these products.

A matrix product in float8 takes both operands with the dim that is summed as the last one in memory. A matrix that
takes part in a forward and in a backward product is therefore needed twice: as it is, and with rows and columns
exchanged. With a scale for each row, or for each column of the exchanged matrix, the second comes from the first: a
power of two only moves the exponent, so that values keep their bits unless they are below 2^-14 of the largest of their
row or column. DeepSeek-V3 does the same with tiles (https://arxiv.org/abs/2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_core.torch.kernels.devices import dense_rows, operator, runs_kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

SMALLEST = 1e-12
"""Lower bound of the largest absolute value that a scale is computed from, so that zeros have one."""

ROWS, BLOCK = 4, 1024
"""Rows that a program rounds, and the columns of them that it holds at one time."""

TILE = (128, 64)
"""Rows and columns that a program exchanges."""


class Float8Matrix(NamedTuple):
    """A matrix in 8 bits, which means `values * scales`.

    Args:
        values: float8 `[n, m]`, the entries of a row next to one another in memory.
        scales: float32 `[n, 1]`, of each row, or `[1, 1]`, of all values.
    """

    values: Tensor
    scales: Tensor

    def wide(self) -> Tensor:
        """Return the matrix in float32."""
        return self.values.float() * self.scales


def rounded_rows(x: Tensor, *, with_columns: bool = False) -> tuple[Float8Matrix, Tensor]:
    """Round a matrix to E4M3 with a power of two as the scale of each row.

    Args:
        x: `[n, m]`.
        with_columns: True to measure columns as well, in the same pass.

    Returns:
        The matrix, and the largest absolute value of each column, float32 `[m]`; empty unless asked for.
    """
    values, scales, largest = torch.ops.rl_core.float8_rows(dense_rows(x), with_columns)
    return Float8Matrix(values, scales), largest


def rounded_columns(x: Tensor | Float8Matrix, largest: Tensor) -> Float8Matrix:
    """Round a matrix to E4M3 with a power of two as the scale of each column, rows and columns exchanged.

    Args:
        x: `[n, m]`, or what `rounded_rows` returned for it.
        largest: Largest absolute value of each column, float32 `[m]`.

    Returns:
        `[m, n]`.
    """
    values, row_scales = (dense_rows(x), None) if isinstance(x, Tensor) else x
    _, by_column, scales = torch.ops.rl_core.float8_tiles(values, row_scales, largest, E4M3, True, False, True)
    return Float8Matrix(by_column, scales)


def rounded_whole(
    x: Tensor, largest: Tensor, dtype: torch.dtype, *, rows: bool = True, columns: bool = True
) -> tuple[Float8Matrix, Float8Matrix]:
    """Round a matrix with one scale.

    Args:
        x: `[n, m]`.
        largest: Largest absolute value, float32 with one element; see `largest_of`.
        dtype: E4M3 or E5M2.
        rows: True to return the matrix as it is; otherwise the first result is empty.
        columns: True to return it with rows and columns exchanged; otherwise the second result is empty.
    """
    values, by_column, scales = torch.ops.rl_core.float8_tiles(
        dense_rows(x), None, largest, dtype, False, rows, columns
    )
    return Float8Matrix(values, scales), Float8Matrix(by_column, scales)


def largest_of(x: Tensor) -> Tensor:
    """Return the largest absolute value, float32 `[1]`."""
    return torch.linalg.vector_norm(x, torch.inf).float().view(1)


def product(a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False, emulate: bool) -> Tensor:
    """Return the product of `a` `[n, k]` with the rows of `b` `[m, k]`, `[n, m]`.

    Args:
        a: Left operand.
        b: Right operand.
        dtype: Dtype of the result.
        fast: True to add up with fewer bits where the hardware can.
        emulate: True to multiply in float32, on any device.
    """
    if emulate:
        return (a.wide() @ b.wide().T).to(dtype)
    return torch._scaled_mm(a.values, b.values.T, a.scales, b.scales.T, out_dtype=dtype, use_fast_accum=fast)


def _factors(largest: Tensor, dtype: torch.dtype, *, is_rounded: bool) -> Tensor:
    """Return the factors that bring values up to `largest` up to the largest value of a dtype."""
    factors = (torch.finfo(dtype).max / largest.double().clamp_min(SMALLEST)).float()
    if not is_rounded:
        return factors
    powers = (factors.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(factors.isnan(), factors, powers)


def _scaled(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    top = torch.finfo(dtype).max
    return (x.float() * factors).clamp_(-top, top).to(dtype)


def _rows_empty(x: Tensor, with_columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    num, size = x.shape
    return (
        x.new_empty((num, size), dtype=E4M3),
        x.new_empty((num, 1), dtype=torch.float32),
        x.new_empty(size if with_columns else 0, dtype=torch.float32),
    )


@operator("float8_rows", _rows_empty)
def _rows(x: Tensor, with_columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not runs_kernels(x.device):
        magnitudes = x.abs()
        factors = _factors(magnitudes.amax(1, keepdim=True), E4M3, is_rounded=True)
        largest = magnitudes.amax(0).float() if with_columns else x.new_empty(0, dtype=torch.float32)
        return _scaled(x, factors, E4M3), factors.reciprocal(), largest
    from rl_core.torch.kernels.byte_programs import float8_rows

    values, scales, _ = _rows_empty(x, with_columns)
    num, size = x.shape
    bits = x.new_zeros(size, dtype=torch.int32) if with_columns else x.new_empty(0, dtype=torch.int32)
    if num:
        block = min(BLOCK, max(256, 1 << (size - 1).bit_length()))
        options = {"HAS_COLUMNS": with_columns, "TOP": torch.finfo(E4M3).max, "ROWS": ROWS, "BLOCK": block}
        with torch.cuda.device_of(x):
            program = float8_rows[(-(-num // ROWS),)]
            program(x, values, scales, bits, num, size, x.stride(0), **options, num_warps=block // 128)
    return values, scales, bits.view(torch.float32)


def _tiles_empty(
    x: Tensor,
    row_scales: Tensor | None,
    largest: Tensor,
    dtype: torch.dtype,
    by_column: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num, size = x.shape
    return (
        x.new_empty((num, size) if rows else 0, dtype=dtype),
        x.new_empty((size, num) if columns else 0, dtype=dtype),
        x.new_empty((size if by_column else 1, 1), dtype=torch.float32),
    )


@operator("float8_tiles", _tiles_empty)
def _tiles(
    x: Tensor,
    row_scales: Tensor | None,
    largest: Tensor,
    dtype: torch.dtype,
    by_column: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    values, exchanged, scales = _tiles_empty(x, row_scales, largest, dtype, by_column, rows, columns)
    if not runs_kernels(x.device):
        factors = _factors(largest, dtype, is_rounded=by_column)
        rounded = _scaled(x if row_scales is None else x.float() * row_scales, factors, dtype)
        scales = factors.reciprocal().view(-1, 1)
        return rounded if rows else values, rounded.T.contiguous() if columns else exchanged, scales
    from rl_core.torch.kernels.byte_programs import float8_tiles

    num, size = x.shape
    if num:
        has = {"HAS_SCALES": row_scales is not None, "HAS_ROWS": rows, "HAS_COLUMNS": columns}
        options = {**has, "IS_BY_COLUMN": by_column, "TOP": torch.finfo(dtype).max, "ROWS": TILE[0], "COLUMNS": TILE[1]}
        written = values if rows else None, exchanged if columns else None, scales
        program = float8_tiles[(-(-num // TILE[0]), -(-size // TILE[1]))]
        with torch.cuda.device_of(x):
            program(x, row_scales, largest.view(torch.int32), *written, num, size, x.stride(0), **options, num_warps=8)
    return values, exchanged, scales
