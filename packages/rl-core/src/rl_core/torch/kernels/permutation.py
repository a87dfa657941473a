"""Copies of tokens for each of their experts or ranks, and sums of the results.

A *place* is the row of a copy, or -1 for none. Tokens have several, `[tokens, n]`, and no two copies share one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_core.torch.kernels.devices import dense, operator, takes

BLOCK = 1024
"""Entries of a row that one program copies."""


class Groups(NamedTuple):
    """Rows grouped by expert.

    Args:
        places: int32 `[tokens, k]`, the row of each choice.
        ends: int32 `[experts]`, the end of the rows of each expert.
    """

    places: Tensor
    ends: Tensor


def group_by_expert(ids: Tensor, num_experts: int) -> Groups:
    """Group choices by expert, in the order of tokens; the host does not wait.

    Args:
        ids: Chosen experts, int `[tokens, k]`; `num_experts` means an expert elsewhere, which gets no place.
        num_experts: Number of experts.
    """
    dtype = torch.int16 if num_experts < torch.iinfo(torch.int16).max else torch.int32  # few passes of a radix sort
    keys, order = ids.flatten().to(dtype).sort(stable=True)
    bounds = torch.arange(num_experts, dtype=dtype, device=ids.device)
    ends = torch.searchsorted(keys, bounds, right=True, out_int32=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    return Groups(places.view(ids.shape).masked_fill_(ids >= num_experts, -1), ends)


def spread(x: Tensor, places: Tensor, num_rows: int, *, fused: bool = True) -> Tensor:
    """Copy tokens to their places; one read of each token on GPUs.

    Args:
        x: `[tokens, features]`.
        places: int `[tokens, n]`, below `num_rows`.
        num_rows: Number of rows of the result.
        fused: False to index also where kernels run.

    Returns:
        `[num_rows, features]`. Rows that are not a place of any token have undefined values and take no gradient; they
        are zero if there are no tokens.
    """
    if not (fused and takes(x)):
        return plain_spread(x, places, num_rows)[0]
    rows: Tensor = _Spread.apply(x, None, places, num_rows)[0]
    return rows


def spread_weighted(
    x: Tensor, weights: Tensor, places: Tensor, num_rows: int, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """Copy tokens, and the weight of each copy, to their places.

    Args:
        x: `[tokens, features]`.
        weights: `[tokens, n]`.
        places: int `[tokens, n]`, below `num_rows`.
        num_rows: Number of rows of the result.
        fused: False to index also where kernels run.

    Returns:
        Rows as by `spread`, and their weights `[num_rows]`.
    """
    if not (fused and takes(x, weights)):
        return plain_spread(x, places, num_rows, weights)
    rows, row_weights = _Spread.apply(x, weights, places, num_rows)
    return rows, row_weights


def collect(rows: Tensor, places: Tensor, *, fused: bool = True) -> Tensor:
    """Add up the rows at the places of each token, in float32 or wider.

    Args:
        rows: `[num_rows, features]`.
        places: int `[tokens, n]`.
        fused: False to index also where kernels run.

    Returns:
        `[tokens, features]`, in the dtype of the rows.
    """
    if not (fused and takes(rows)):
        return plain_collect(rows, places)
    out: Tensor = _Collect.apply(rows, places)
    return out


def plain_spread(x: Tensor, places: Tensor, num_rows: int, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the same as `spread` and `spread_weighted` by indexing; rows that are no token's place are zero."""
    nothing = places.numel()
    targets = places.where(places >= 0, num_rows).flatten().long()
    sources = torch.full((num_rows + 1,), nothing, dtype=torch.int64, device=x.device)
    sources = sources.scatter(0, targets, torch.arange(nothing, device=x.device))[:num_rows]
    # Rows without a token read the zeros at the end, whose gradient is dropped.
    rows = torch.cat([x, x.new_zeros(1, x.shape[1])])[sources // max(places.shape[1], 1)]
    if weights is None:
        return rows, x.new_empty(0)
    return rows, torch.cat([weights.flatten(), weights.new_zeros(1)])[sources]


def plain_collect(rows: Tensor, places: Tensor) -> Tensor:
    """Return the same as `collect` by indexing."""
    if not places.numel():
        return rows[:0].sum() + rows.new_zeros(len(places), rows.shape[1])
    found = rows[places.clamp(min=0)]
    return found.where((places >= 0)[..., None], 0.0).sum(1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, places: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        ctx.set_materialize_grads(False)
        rows, row_weights = torch.ops.rl_core.spread_rows(dense(x), weights, places, num_rows)
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, by_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        if grad is None:
            fetched = None if by_weights is None else by_weights[places.clamp(min=0)].where(places >= 0, 0.0)
            return None, fetched, None, None
        given = by_weights if ctx.needs_input_grad[1] else None
        by_x, own_weights = torch.ops.rl_core.collect_rows(dense(grad), given, places)
        return by_x, None if given is None else own_weights, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows = len(rows)
        out: Tensor = torch.ops.rl_core.collect_rows(dense(rows), None, places)[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return torch.ops.rl_core.spread_rows(dense(grad), None, places, ctx.num_rows)[0], None


def _launch(num_tokens: int, size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of the programs, and what each copies."""
    block = min(BLOCK, max(16, 1 << (size - 1).bit_length()))
    return (num_tokens, -(-size // block)), {"BLOCK": block, "num_warps": 4}


def _spread_empty(x: Tensor, weights: Tensor | None, places: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return x.new_empty((num_rows, x.shape[1])), x.new_empty(0) if weights is None else weights.new_empty(num_rows)


@operator("spread_rows", _spread_empty)
def _spread(x: Tensor, weights: Tensor | None, places: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    from rl_core.torch.kernels.row_programs import spread_rows

    out, out_weights = _spread_empty(x, weights, places, num_rows)
    if x.numel() and places.numel():
        grid, shape = _launch(*x.shape)
        given = places.contiguous(), None if weights is None else weights.contiguous()
        options = {"HAS_WEIGHTS": weights is not None, "PLACES": places.shape[1]}
        with torch.cuda.device_of(x):
            spread_rows[grid](x, *given, out, out_weights, x.shape[1], x.stride(0), **options, **shape)
    else:
        out.zero_()
    return out, out_weights


def _collect_empty(rows: Tensor, weights: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor]:
    out_weights = rows.new_empty(0) if weights is None else weights.new_empty(places.shape)
    return rows.new_empty((len(places), rows.shape[1])), out_weights


@operator("collect_rows", _collect_empty)
def _collect(rows: Tensor, weights: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor]:
    from rl_core.torch.kernels.row_programs import collect_rows

    out, out_weights = _collect_empty(rows, weights, places)
    if out.numel():
        grid, shape = _launch(*out.shape)
        given = places.contiguous(), None if weights is None else weights.contiguous()
        options = {"HAS_WEIGHTS": weights is not None, "PLACES": places.shape[1]}
        with torch.cuda.device_of(rows):
            collect_rows[grid](rows, *given, out, out_weights, rows.shape[1], rows.stride(0), **options, **shape)
    return out, out_weights
