"""Triton programs that copy tokens to their places and add up what is there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spread_rows(
    x: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    out_weights: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a block of one token to each of its places, and by the first block the weight of each place."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(x + token * x_stride + columns, mask=mask, other=0.0)
    for index in range(PLACES):
        place = tl.load(places + token * PLACES + index).to(tl.int64)
        tl.store(out + place * size + columns, values, mask=mask & (place >= 0))
        if HAS_WEIGHTS:
            weight = tl.load(weights + token * PLACES + index)
            tl.store(out_weights + place, weight, mask=(place >= 0) & (tl.program_id(1) == 0))


@triton.jit
def collect_rows(
    rows: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    out_weights: tl.tensor,
    size: tl.tensor,
    row_stride: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up a block of the rows at the places of one token, and fetch the weights that are there."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(PLACES):
        place = tl.load(places + token * PLACES + index).to(tl.int64)
        total += tl.load(rows + place * row_stride + columns, mask=mask & (place >= 0), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            weight = tl.load(weights + place, mask=place >= 0, other=0.0)
            tl.store(out_weights + token * PLACES + index, weight, mask=tl.program_id(1) == 0)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=mask)
