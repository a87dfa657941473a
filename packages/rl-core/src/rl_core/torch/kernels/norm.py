"""RMSNorm, alone or of a sum with a residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_core.torch.kernels.devices import dense_rows, num_programs, operator, takes

LARGEST_SIZE = 16_384
"""Largest number of features that one program holds."""

LARGEST_COLLECTED = 8192
"""Largest number of features for which a program also collects the weight's gradient; for more it is computed apart,
by a second read."""

TILE, BACKWARD_TILE = 4096, 1024
"""Entries that a program of each pass computes at one time, in rows of fewer features."""

WEIGHT_COLUMNS = 256
"""Entries of the weight whose gradient one program computes, of rows that are too long to collect it."""


@dataclass(frozen=True)
class NormForm:
    """One of the formulas that model families have for `weight * x / rms(x)`, which differ in half precision.

    Args:
        eps: Added to the mean square.
        offset: Added to the weight; 1 in Gemma.
        rounds_first: True if the normalised values are rounded to the dtype of `x` before they are multiplied by the
            weight, and the result has the dtype of that product (Llama, Qwen); False if the product is rounded to the
            dtype of `x`.
    """

    eps: float
    offset: float = 0.0
    rounds_first: bool = True

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the plain formula, `[..., features]`; `weight` is `[features]`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.rounds_first:
            return (weight + self.offset if self.offset else weight) * normed.to(x.dtype)
        return (normed * (weight.to(wide.dtype) + self.offset)).to(x.dtype)


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel computes a norm of these tensors."""
    return takes(x, weight) and x.shape[-1] <= LARGEST_SIZE and weight.shape == x.shape[-1:]


def rms_norm(x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
    """Normalise `x` `[..., features]`, in the same shape; one read and one write on GPUs.

    Args:
        x: Values.
        weight: `[features]`.
        form: Formula to compute.
    """
    if not takes_norm(x, weight):
        return form(x, weight)
    normed: Tensor = _Norm.apply(x, None, weight, form)[0]
    return normed


def add_rms_norm(x: Tensor, addend: Tensor | None, weight: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
    """Normalise a sum that is also handed on, such as the residual stream between the parts of a layer.

    The gradients by the sum and by the normalised values are added in the same pass.

    Args:
        x: `[..., features]`.
        addend: Same shape, added to `x`; None to hand on `x` itself.
        weight: `[features]`.
        form: Formula to compute.

    Returns:
        The normalised sum and the sum.
    """
    if not takes_norm(x, weight) or (addend is not None and not (takes(addend) and addend.shape == x.shape)):
        total = x if addend is None else x + addend
        return form(total, weight), total
    normed, total = _Norm.apply(x, addend, weight, form)
    return normed, total


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, weight: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
        dtype = x.dtype if addend is None else torch.promote_types(x.dtype, addend.dtype)
        dtype = torch.promote_types(dtype, weight.dtype) if form.rounds_first else dtype
        rows, added = dense_rows(x), None if addend is None else dense_rows(addend)
        normed, total, inverse = torch.ops.rl_core.rms_norm(
            rows, added, weight, form.eps, form.offset, form.rounds_first, dtype
        )
        total = x if addend is None else total.view(x.shape)
        ctx.form, ctx.dtypes = form, (x.dtype, None if addend is None else addend.dtype)
        ctx.save_for_backward(total, weight, inverse)
        ctx.set_materialize_grads(False)
        return normed.view(x.shape), total.view_as(total) if addend is None else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, by_total: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, inverse = ctx.saved_tensors
        if grad is None:
            by_x, by_weight = by_total, None
        else:
            added = None if by_total is None else dense_rows(by_total)
            settings = ctx.form.offset, ctx.form.rounds_first, ctx.needs_input_grad[2]
            by_x, by_weight = torch.ops.rl_core.rms_norm_backward(
                dense_rows(grad), added, dense_rows(total), weight, inverse, *settings
            )
            by_x = by_x.view(total.shape)
            by_weight = by_weight.to(weight.dtype) if ctx.needs_input_grad[2] else None
        of_x, of_addend = ctx.dtypes
        needs_x, needs_addend = ctx.needs_input_grad[:2]
        return (
            by_x.to(of_x) if needs_x and by_x is not None else None,
            by_x.to(of_addend) if needs_addend and by_x is not None else None,
            by_weight,
            None,
        )


def _launch(size: int) -> dict[str, int]:
    """Return the shape of a program's tile, and its warps, of the forward pass."""
    columns = max(16, 1 << (size - 1).bit_length())
    rows = max(1, min(16, TILE // columns))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": max(4, min(16, rows * columns // 512))}


def _backward_launch(size: int) -> dict[str, int]:
    """Return the same for the backward pass.

    A thread holds 4 or 8 entries of each tensor. With more, its registers would leave room for a quarter of the warps
    that a multiprocessor can hold.
    """
    columns = max(16, 1 << (size - 1).bit_length())
    if columns > LARGEST_COLLECTED:
        return {"ROWS": 1, "COLUMNS": columns, "num_warps": 16}
    rows = max(1, min(16, BACKWARD_TILE // columns))
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": max(8, columns // 256)}


def _empty(
    x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, offset: float, rounds_first: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    num, size = x.shape
    total = x.new_empty(0)
    if addend is not None:
        total = x.new_empty((num, size), dtype=torch.promote_types(x.dtype, addend.dtype))
    return x.new_empty((num, size), dtype=dtype), total, x.new_empty(num, dtype=torch.float32)


@operator("rms_norm", _empty)
def _forward(
    x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, offset: float, rounds_first: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    from rl_core.torch.kernels.layer_programs import rms_norm_forward

    normed, total, inverse = _empty(x, addend, weight, eps, offset, rounds_first, dtype)
    num, size = x.shape
    if num:
        shape = _launch(size)
        strides = x.stride(0), 0 if addend is None else addend.stride(0)
        options = {"HAS_ADDEND": addend is not None, "OFFSET": offset, "ROUNDS_FIRST": rounds_first, **shape}
        program = rms_norm_forward[(-(-num // shape["ROWS"]),)]
        with torch.cuda.device_of(x):
            program(x, addend, weight, normed, total, inverse, num, size, *strides, eps, **options)
    return normed, total, inverse


def _backward_empty(grad: Tensor, by_total: Tensor | None, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


@operator("rms_norm_backward", _backward_empty)
def _backward(
    grad: Tensor,
    by_total: Tensor | None,
    x: Tensor,
    weight: Tensor,
    inverse: Tensor,
    offset: float,
    rounds_first: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    from rl_core.torch.kernels.layer_programs import rms_norm_backward, rms_norm_weight_gradient

    num, size = x.shape
    by_x = x.new_empty((num, size))
    shape = _backward_launch(size)
    collects = needs_weight and size <= LARGEST_COLLECTED
    programs = num_programs(x.device, -(-num // shape["ROWS"]))
    if not num:
        return by_x, x.new_zeros(size, dtype=torch.float32)
    # Every program writes its part.
    parts = x.new_empty((programs if needs_weight else 0, size), dtype=torch.float32)
    strides = grad.stride(0), 0 if by_total is None else by_total.stride(0), x.stride(0)
    options = {"HAS_TOTAL": by_total is not None, "NEEDS_WEIGHT": collects, "OFFSET": offset, **shape}
    rounds = {"ROUNDS_FIRST": rounds_first}
    with torch.cuda.device_of(x):
        program = rms_norm_backward[(programs,)]
        program(grad, by_total, x, weight, inverse, by_x, parts, num, size, *strides, **options, **rounds)
        if needs_weight and not collects:
            options = {"ROWS": BACKWARD_TILE // WEIGHT_COLUMNS, "COLUMNS": WEIGHT_COLUMNS, "num_warps": 8}
            program = rms_norm_weight_gradient[(programs, -(-size // WEIGHT_COLUMNS))]
            program(grad, x, inverse, parts, num, size, grad.stride(0), x.stride(0), **options, **rounds)
    return by_x, parts.sum(0)
