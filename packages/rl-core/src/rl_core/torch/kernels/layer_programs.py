"""Triton programs of RMSNorm, rotary embeddings and SwiGLU.

Numbers of tokens are not specialised: Triton would compile a program again when a number is a multiple of 16 and the
one before was not, in the middle of a step. Sizes and strides of features are, because loads of 16 bytes depend on it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
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


@triton.jit(do_not_specialize=["num_rows"])
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
    """Write gradients by the rows that were normalised, plus gradients by their sum.

    Each program also writes its part of the gradient by the weight, `[programs, size]`.
    """
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


@triton.jit(do_not_specialize=["num_rows"])
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
    """Write a program's part of the gradient by some entries of the weight, `[programs, size]`.

    The rows are too long for `rms_norm_backward` to collect it.
    """
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


@triton.jit
def _pieces(
    values: tl.tensor,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    is_row: tl.tensor,
) -> Any:
    """Return the two halves that are rotated and the rest of a vector or of rows, whose first entries `values` point
    to."""
    half = tl.arange(0, HALF)[None, :]
    rest = tl.arange(0, REST)[None, :]
    in_half = is_row & (half < ROTARY // 2)
    in_rest = is_row & (rest < SIZE - ROTARY)
    left = tl.load(values + half, mask=in_half, other=0.0)
    right = tl.load(values + ROTARY // 2 + half, mask=in_half, other=0.0)
    kept = tl.load(values + ROTARY + rest, mask=in_rest, other=0.0)
    return left, right, kept


@triton.jit
def _store_pieces(
    values: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    kept: tl.tensor,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    is_row: tl.tensor,
) -> None:
    half = tl.arange(0, HALF)[None, :]
    rest = tl.arange(0, REST)[None, :]
    in_half = is_row & (half < ROTARY // 2)
    dtype = values.dtype.element_ty
    tl.store(values + half, left.to(dtype), mask=in_half)
    tl.store(values + ROTARY // 2 + half, right.to(dtype), mask=in_half)
    if SIZE > ROTARY:
        tl.store(values + ROTARY + rest, kept.to(dtype), mask=is_row & (rest < SIZE - ROTARY))


@triton.jit
def _inverse(left: tl.tensor, right: tl.tensor, kept: tl.tensor, SIZE: tl.constexpr, eps: tl.tensor) -> Any:
    """Return the inverse root mean square of each row, `[rows, 1]`."""
    squares = tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1) + tl.sum(kept * kept, axis=1)
    return tl.math.rsqrt(squares / SIZE + eps)[:, None]


@triton.jit
def _through_norm(
    by_left: tl.tensor,
    by_right: tl.tensor,
    by_kept: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    kept: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
) -> Any:
    """Return gradients by rows, from the gradients by the rows divided by their root mean square."""
    share = tl.sum(by_left * left, axis=1) + tl.sum(by_right * right, axis=1) + tl.sum(by_kept * kept, axis=1)
    share = (share / SIZE)[:, None]
    return (by_left - left * share) * scale, (by_right - right * share) * scale, (by_kept - kept * share) * scale


@triton.jit
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_heads: tl.tensor,
    num_tokens: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_token: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_token: tl.tensor,
    angle_batch: tl.tensor,
    angle_token: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate all heads of one token, `HEADS` at a time."""
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    angle = batch * angle_batch + token * angle_token
    cos_left, cos_right, _ = _pieces(cos + angle, ROTARY, ROTARY, HALF, REST, True)
    sin_left, sin_right, _ = _pieces(sin + angle, ROTARY, ROTARY, HALF, REST, True)
    for first in range(0, num_heads, HEADS):
        heads = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        is_head = heads < num_heads
        place = x + batch * x_batch + token * x_token + heads * x_head
        left, right, kept = _pieces(place, SIZE, ROTARY, HALF, REST, is_head)
        dtype = left.dtype
        left, right, kept = left.to(tl.float32), right.to(tl.float32), kept.to(tl.float32)
        if HAS_NORM:
            scale = _inverse(left, right, kept, SIZE, eps)
            left, right, kept = left * scale, right * scale, kept * scale
            if ROUNDS_FIRST:
                left, right, kept = left.to(dtype), right.to(dtype), kept.to(dtype)
            w_left, w_right, w_kept = _pieces(weight, SIZE, ROTARY, HALF, REST, True)
            left = left.to(tl.float32) * (w_left.to(tl.float32) + OFFSET)
            right = right.to(tl.float32) * (w_right.to(tl.float32) + OFFSET)
            kept = kept.to(tl.float32) * (w_kept.to(tl.float32) + OFFSET)
        turned = left * cos_left.to(tl.float32) - right * sin_left.to(tl.float32)
        right = right * cos_right.to(tl.float32) + left * sin_right.to(tl.float32)
        place = out + batch * out_batch + token * out_token + heads * out_head
        _store_pieces(place, turned, right, kept, SIZE, ROTARY, HALF, REST, is_head)


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_forward(
    x: tl.tensor,
    other: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    other_weight: tl.tensor,
    out: tl.tensor,
    other_out: tl.tensor,
    num_heads: tl.tensor,
    num_others: tl.tensor,
    num_tokens: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_token: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_token: tl.tensor,
    other_batch: tl.tensor,
    other_head: tl.tensor,
    other_token: tl.tensor,
    other_out_batch: tl.tensor,
    other_out_head: tl.tensor,
    other_out_token: tl.tensor,
    angle_batch: tl.tensor,
    angle_token: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    OTHER_HEADS: tl.constexpr,
) -> None:
    """Rotate the heads of one token: of queries in the first column of programs, of keys in the second."""
    if tl.program_id(1) == 0:
        _rotate(
            x, cos, sin, weight, out, num_heads, num_tokens, x_batch, x_head, x_token, out_batch, out_head, out_token,
            angle_batch, angle_token, eps, HAS_NORM, OFFSET, ROUNDS_FIRST, SIZE, ROTARY, HALF, REST, HEADS,
        )  # fmt: skip
    else:
        _rotate(
            other, cos, sin, other_weight, other_out, num_others, num_tokens, other_batch, other_head, other_token,
            other_out_batch, other_out_head, other_out_token, angle_batch, angle_token, eps, HAS_NORM, OFFSET,
            ROUNDS_FIRST, SIZE, ROTARY, HALF, REST, OTHER_HEADS,
        )  # fmt: skip


@triton.jit
def _rotate_back(
    grad: tl.tensor,
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    grad_x: tl.tensor,
    by_weight: tl.tensor,
    num_heads: tl.tensor,
    num_tokens: tl.tensor,
    num_places: tl.tensor,
    grad_batch: tl.tensor,
    grad_head: tl.tensor,
    grad_token: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_token: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_token: tl.tensor,
    angle_batch: tl.tensor,
    angle_token: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Write gradients by the heads that were rotated, token by token.

    Each program also writes its part of the gradient by the weight of the norm, `[columns, programs, SIZE]`.
    `num_places` is the number of tokens of all rows.
    """
    of_left = tl.zeros([HEADS, HALF], dtype=tl.float32)
    of_right = tl.zeros([HEADS, HALF], dtype=tl.float32)
    of_kept = tl.zeros([HEADS, REST], dtype=tl.float32)
    for place in range(tl.program_id(0), num_places, tl.num_programs(0)):
        batch = (place // num_tokens).to(tl.int64)
        token = (place % num_tokens).to(tl.int64)
        angle = batch * angle_batch + token * angle_token
        cos_left, cos_right, _ = _pieces(cos + angle, ROTARY, ROTARY, HALF, REST, True)
        sin_left, sin_right, _ = _pieces(sin + angle, ROTARY, ROTARY, HALF, REST, True)
        for first in range(0, num_heads, HEADS):
            heads = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
            is_head = heads < num_heads
            given = grad + batch * grad_batch + token * grad_token + heads * grad_head
            given_left, given_right, by_kept = _pieces(given, SIZE, ROTARY, HALF, REST, is_head)
            given_left, given_right = given_left.to(tl.float32), given_right.to(tl.float32)
            by_kept = by_kept.to(tl.float32)
            by_left = given_left * cos_left.to(tl.float32) + given_right * sin_right.to(tl.float32)
            by_right = given_right * cos_right.to(tl.float32) - given_left * sin_left.to(tl.float32)
            if HAS_NORM:
                source = x + batch * x_batch + token * x_token + heads * x_head
                left, right, kept = _pieces(source, SIZE, ROTARY, HALF, REST, is_head)
                dtype = left.dtype
                left, right, kept = left.to(tl.float32), right.to(tl.float32), kept.to(tl.float32)
                scale = _inverse(left, right, kept, SIZE, eps)
                left, right, kept = left * scale, right * scale, kept * scale
                if NEEDS_WEIGHT:
                    if ROUNDS_FIRST:
                        of_left += by_left * left.to(dtype).to(tl.float32)
                        of_right += by_right * right.to(dtype).to(tl.float32)
                        of_kept += by_kept * kept.to(dtype).to(tl.float32)
                    else:
                        of_left += by_left * left
                        of_right += by_right * right
                        of_kept += by_kept * kept
                weights = _pieces(weight, SIZE, ROTARY, HALF, REST, True)
                by_left *= weights[0].to(tl.float32) + OFFSET
                by_right *= weights[1].to(tl.float32) + OFFSET
                by_kept *= weights[2].to(tl.float32) + OFFSET
                by_left, by_right, by_kept = _through_norm(by_left, by_right, by_kept, left, right, kept, scale, SIZE)
            out = grad_x + batch * out_batch + token * out_token + heads * out_head
            _store_pieces(out, by_left, by_right, by_kept, SIZE, ROTARY, HALF, REST, is_head)
    if NEEDS_WEIGHT:
        part = (
            by_weight
            + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * SIZE
            + tl.zeros([1, 1], dtype=tl.int64)
        )
        left = tl.sum(of_left, axis=0)[None, :]
        right = tl.sum(of_right, axis=0)[None, :]
        kept = tl.sum(of_kept, axis=0)[None, :]
        _store_pieces(part, left, right, kept, SIZE, ROTARY, HALF, REST, tl.full([1, 1], 1, dtype=tl.int1))


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def rotary_backward(
    grad: tl.tensor,
    by_other: tl.tensor,
    x: tl.tensor,
    other: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    other_weight: tl.tensor,
    grad_x: tl.tensor,
    grad_other: tl.tensor,
    by_weight: tl.tensor,
    num_heads: tl.tensor,
    num_others: tl.tensor,
    num_tokens: tl.tensor,
    num_places: tl.tensor,
    grad_batch: tl.tensor,
    grad_head: tl.tensor,
    grad_token: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_token: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_token: tl.tensor,
    by_other_batch: tl.tensor,
    by_other_head: tl.tensor,
    by_other_token: tl.tensor,
    other_batch: tl.tensor,
    other_head: tl.tensor,
    other_token: tl.tensor,
    other_out_batch: tl.tensor,
    other_out_head: tl.tensor,
    other_out_token: tl.tensor,
    angle_batch: tl.tensor,
    angle_token: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    OTHER_HEADS: tl.constexpr,
) -> None:
    """Write gradients by the heads that were rotated, in two columns of programs as `rotary_forward`."""
    if tl.program_id(1) == 0:
        _rotate_back(
            grad, x, cos, sin, weight, grad_x, by_weight, num_heads, num_tokens, num_places, grad_batch, grad_head,
            grad_token, x_batch, x_head, x_token, out_batch, out_head, out_token, angle_batch, angle_token, eps,
            HAS_NORM, NEEDS_WEIGHT, OFFSET, ROUNDS_FIRST, SIZE, ROTARY, HALF, REST, HEADS,
        )  # fmt: skip
    else:
        _rotate_back(
            by_other, other, cos, sin, other_weight, grad_other, by_weight, num_others, num_tokens, num_places,
            by_other_batch, by_other_head, by_other_token, other_batch, other_head, other_token, other_out_batch,
            other_out_head, other_out_token, angle_batch, angle_token, eps, HAS_NORM, NEEDS_WEIGHT, OFFSET,
            ROUNDS_FIRST, SIZE, ROTARY, HALF, REST, OTHER_HEADS,
        )  # fmt: skip


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
    """Write `silu(gate) * up` of a block of one row, times the weight of the row if rows have weights."""
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
    """Write gradients by gate and up of a block of one row, and the block's part of the row's weight's gradient."""
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
