"""Triton programs that round values to 8 bits, and that digest bytes."""

from __future__ import annotations

import triton
import triton.language as tl

ABSOLUTE = tl.constexpr(0x7FFFFFFF)
"""All bits of a float32 except its sign. Absolute values are in the order of these bits, and NaN is above all."""

EXPONENT = tl.constexpr(0x7F800000)
"""The bits of a float32 that hold its exponent."""

SMALLEST = tl.constexpr(1e-12)
"""Lower bound of the largest absolute value that a scale is computed from."""


@triton.jit
def _magnitudes(values: tl.tensor) -> tl.tensor:
    """Return the bits of absolute values in float32, int32."""
    return values.to(tl.float32).to(tl.int32, bitcast=True) & ABSOLUTE


@triton.jit
def _factors(largest: tl.tensor, TOP: tl.constexpr, IS_ROUNDED: tl.constexpr) -> tl.tensor:
    """Return the factors that bring values up to `largest`, given as bits, up to `TOP`."""
    wide = largest.to(tl.float32, bitcast=True).to(tl.float64)
    factors = (TOP / tl.where(wide < SMALLEST, SMALLEST, wide)).to(tl.float32)
    if IS_ROUNDED:
        powers = (factors.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
        factors = tl.where(factors == factors, powers, factors)
    return factors


@triton.jit
def _rounded(values: tl.tensor, factors: tl.tensor, TOP: tl.constexpr, kind: tl.constexpr) -> tl.tensor:
    scaled = values.to(tl.float32) * factors
    return tl.clamp(scaled, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL).to(kind)


@triton.jit(do_not_specialize=["num_rows"])
def float8_rows(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    column_largest: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    HAS_COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Round rows to 8 bits with a power of two as the scale of each.

    A program reads its rows twice, the second time from a cache. The bits of the largest absolute value of each column
    are collected in `column_largest`, which begins with zeros; the order of the programs does not matter.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = rows < num_rows
    found = tl.zeros([ROWS, BLOCK], dtype=tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (columns < size)[None, :]
        tile = tl.load(
            x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_last"
        )
        magnitudes = _magnitudes(tile)
        found = tl.maximum(found, magnitudes)
        if HAS_COLUMNS:
            tl.atomic_max(column_largest + columns, tl.max(magnitudes, axis=0), mask=columns < size, sem="relaxed")
    factors = _factors(tl.max(found, axis=1), TOP, True)
    tl.store(scales + rows, tl.div_rn(1.0, factors), mask=is_row)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (columns < size)[None, :]
        tile = tl.load(
            x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
        )
        rounded = _rounded(tile, factors[:, None], TOP, values.dtype.element_ty)
        tl.store(values + rows[:, None] * size + columns[None, :], rounded, mask=mask)


@triton.jit
def float8_tiles(
    x: tl.tensor,
    row_scales: tl.tensor,
    largest: tl.tensor,
    values: tl.tensor,
    by_column: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    HAS_SCALES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    IS_BY_COLUMN: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Round a tile to 8 bits with known scales, and write it as it is, with rows and columns exchanged, or both.

    With `IS_BY_COLUMN` each column has its scale, a power of two; otherwise all values share one. `largest` has the
    bits of the largest absolute value of each column, or of all. With `HAS_SCALES` the source is in 8 bits itself.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < size
    mask = is_row[:, None] & is_column[None, :]
    tile = tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        tile = tile.to(tl.float32) * tl.load(row_scales + rows, mask=is_row, other=0.0)[:, None]
    if IS_BY_COLUMN:
        factors = _factors(tl.load(largest + columns, mask=is_column, other=0), TOP, True)
        if tl.program_id(0) == 0:
            tl.store(scales + columns, tl.div_rn(1.0, factors), mask=is_column)
        rounded = _rounded(tile, factors[None, :], TOP, by_column.dtype.element_ty)
    else:
        factor = _factors(tl.load(largest), TOP, False)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scales, tl.div_rn(1.0, factor))
        rounded = _rounded(tile, factor, TOP, values.dtype.element_ty if HAS_ROWS else by_column.dtype.element_ty)
    if HAS_ROWS:
        tl.store(values + rows[:, None] * size + columns[None, :], rounded, mask=mask)
    if HAS_COLUMNS:
        place = by_column + columns[:, None] * num_rows + rows[None, :]
        tl.store(place, tl.trans(rounded), mask=is_column[:, None] & is_row[None, :])


@triton.jit
def _mixed(
    lanes: tl.tensor, places: tl.tensor, KEY: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr
) -> tl.tensor:
    mixed = lanes ^ ((places + 1) * KEY)
    mixed = (mixed ^ (mixed >> 30)) * FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    return mixed ^ (mixed >> 31)


@triton.jit(do_not_specialize=["num_lanes", "start"])
def mixed_sums(
    lanes: tl.tensor,
    sums: tl.tensor,
    num_lanes: tl.tensor,
    start: tl.tensor,
    KEY: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write each program's part of the sum of mixed int64 lanes at the positions `start`, `start + 1`, ...; see
    `rl_core.torch.transport.digest`."""
    first = start.to(tl.int64)
    offsets = tl.arange(0, BLOCK).to(tl.int64)
    none = tl.zeros([BLOCK], dtype=tl.int64)
    total = none
    num_blocks = num_lanes // BLOCK
    # Whole blocks need no mask, so that a load takes 16 bytes whatever the number of lanes is.
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        places = (none + block) * BLOCK + offsets
        total += _mixed(tl.load(lanes + places), first + places, KEY, FIRST, SECOND)
    if tl.program_id(0) == 0:
        places = (none + num_blocks) * BLOCK + offsets
        mask = places < num_lanes
        rest = _mixed(tl.load(lanes + places, mask=mask, other=0), first + places, KEY, FIRST, SECOND)
        total += tl.where(mask, rest, 0)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))
