"""Triton programs that copy tokens to their places and add them up, and of the softmax over a vocabulary."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)
"""Below all logits, and finite: its difference from itself is 0."""


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


@triton.jit
def _transformed(products: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr) -> Any:
    """Return logits before the temperature, in float32."""
    logits = products.to(tl.float32) * scale
    if HAS_SOFTCAP:
        # tanh by an exponential that cannot overflow
        weight = tl.exp(-2.0 * tl.abs(logits) / softcap)
        bounded = softcap * (1.0 - weight) / (1.0 + weight)
        logits = tl.where(logits < 0, -bounded, bounded)
    return logits


@triton.jit(do_not_specialize=["num_rows"])
def softmax_statistics(
    products: tl.tensor,
    found: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    temperature: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Read one row once and write its statistics.

    With z the logits over the temperature, these are the largest logit m, the sum of exp(z - m), the sum of
    exp(z - m) (z - m) and, if asked for, the sum of exp(z - m)^2. `width` columns are read, of which `size` count.
    """
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([], LOWEST, dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    weighted = tl.full([], 0.0, dtype=tl.float32)
    squares = tl.full([], 0.0, dtype=tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(products + row * stride + columns, mask=columns < width, other=0.0)
        logits = _transformed(values, scale, softcap, HAS_SOFTCAP) / temperature
        logits = tl.where(columns < size, logits, LOWEST)
        risen = tl.maximum(largest, tl.max(logits, axis=0))
        shrunk = tl.exp(largest - risen)
        shifted = logits - risen
        weights = tl.exp(shifted)
        weighted = shrunk * (weighted + (largest - risen) * total)
        weighted += tl.sum(tl.where(weights > 0.0, weights * shifted, 0.0), axis=0)
        total = shrunk * total + tl.sum(weights, axis=0)
        if HAS_SQUARES:
            squares = shrunk * shrunk * squares + tl.sum(weights * weights, axis=0)
        largest = risen
    tl.store(found + row, largest)
    tl.store(found + num_rows + row, total)
    tl.store(found + 2 * num_rows + row, weighted)
    if HAS_SQUARES:
        tl.store(found + 3 * num_rows + row, squares)


@triton.jit
def softmax_gradient(
    products: tl.tensor,
    log_sum: tl.tensor,
    entropy: tl.tensor,
    by_entropy: tl.tensor,
    collision: tl.tensor,
    by_collision: tl.tensor,
    by_total: tl.tensor,
    columns_read: tl.tensor,
    by_columns: tl.tensor,
    num_read: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    temperature: tl.tensor,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_COLLISION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Replace a block of one row of the products by the gradient by them; see
    `rl_core.torch.heads.head_pass.HeadPass.gradient`. `width` columns are written, with anything in those that only
    fill the row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    columns = start + tl.arange(0, BLOCK)
    mask = columns < width
    place = products + row * stride + columns
    logits = _transformed(tl.load(place, mask=mask, other=0.0), scale, softcap, HAS_SOFTCAP)
    logprobs = logits / temperature - tl.load(log_sum + row)
    probabilities = tl.exp(logprobs)
    factor = tl.zeros([BLOCK], dtype=tl.float32) - tl.load(by_total + row)
    if HAS_COLLISION:
        factor += 2.0 * tl.load(by_collision + row) * (probabilities - tl.load(collision + row))
    if HAS_ENTROPY:
        factor -= tl.load(by_entropy + row) * (logprobs + tl.load(entropy + row))
    grad = tl.where(probabilities > 0.0, probabilities * factor, 0.0)
    for index in range(num_read):
        column = tl.load(columns_read + row * num_read + index)
        if (column >= start) & (column < start + BLOCK):
            grad += tl.where(columns == column, tl.load(by_columns + row * num_read + index), 0.0)
    grad = grad / temperature
    if HAS_SOFTCAP:
        grad *= 1.0 - (logits / softcap) * (logits / softcap)
    tl.store(place, (grad * scale).to(products.dtype.element_ty), mask=mask)
