"""Rotary embeddings of heads, with a norm of each head before them or without."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_core.torch.kernels.devices import dense, num_programs, operator, takes
from rl_core.torch.kernels.norm import NormForm

LARGEST_HEAD = 512
"""Largest heads that one program holds several of."""

HEADS = 16
"""Maximum number of heads that a program rotates at one time."""

TILE = 2048
"""Entries of heads that a program rotates at one time."""


class HeadNorm(NamedTuple):
    """RMSNorm of each head before it is rotated.

    Args:
        weight: `[head_dim]`.
        form: Formula to compute.
    """

    weight: Tensor
    form: NormForm


def rotated(x: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None = None, *, heads_dim: int = 1) -> Tensor:
    """Rotate the first entries of each head by the angles of its token; one read and one write on GPUs.

    The entries i and i + n / 2 of the first n turn together, as in Llama.

    Args:
        x: `[batch, heads, tokens, head_dim]`.
        cos: Cosines `[batch or 1, tokens, n]`, without a gradient.
        sin: Sines, likewise.
        norm: Norm of each head; None if there is none.
        heads_dim: 2 if `x` is `[batch, tokens, heads, head_dim]`.

    Returns:
        Tensor of the shape of `x`, in the dtype of the product of `x` with `cos`. On GPUs the heads of a token lie next
        to one another in memory, as they do in `x` when they come from a projection.
    """
    if not _takes_rotation(x, cos, sin, norm, heads_dim):
        normed = x if norm is None else norm.form(x, norm.weight)
        return plain_rotation(normed, cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim))
    weight, form = (None, None) if norm is None else norm
    by_head = x if heads_dim == 1 else x.transpose(1, 2)
    out: Tensor = _Rotation.apply(by_head, cos, sin, weight, form)
    return out if heads_dim == 1 else out.transpose(1, 2)


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the formula, of tensors that broadcast."""
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    left, right = turned.chunk(2, -1)
    out = (turned * cos) + (torch.cat((-right, left), -1) * sin)
    return out if size == x.shape[-1] else torch.cat([out, kept], -1)


def _takes_rotation(x: Tensor, cos: Tensor, sin: Tensor, norm: HeadNorm | None, heads_dim: int) -> bool:
    if x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or heads_dim not in (1, 2):
        return False
    if cos.requires_grad or sin.requires_grad or cos.shape[-1] % 2:
        return False
    fits = cos.shape[-1] <= x.shape[-1] <= LARGEST_HEAD and cos.shape[1] == x.shape[3 - heads_dim]
    fits &= cos.shape[0] in (1, x.shape[0])
    fits &= norm is None or norm.weight.shape == x.shape[-1:]
    return fits and takes(x, cos, sin, None if norm is None else norm.weight)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, form: NormForm | None) -> Tensor:
        x, cos, sin = dense(x), dense(cos), dense(sin)
        ctx.form = form
        ctx.dtype = x.dtype
        # Without a norm the gradient depends only on the angles.
        ctx.save_for_backward(None if form is None else x, cos, sin, weight)
        out: Tensor = torch.ops.rl_core.rotated(x, cos, sin, weight, *_settings(form))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, weight = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[3]
        by_x, by_weight = torch.ops.rl_core.rotated_backward(
            dense(grad), x, cos, sin, weight, *_settings(ctx.form), needs_weight, ctx.dtype
        )
        return by_x, None, None, by_weight.to(weight.dtype) if needs_weight else None, None


def _settings(form: NormForm | None) -> tuple[float, float, bool]:
    return (0.0, 0.0, False) if form is None else (form.eps, form.offset, form.rounds_first)


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for `[batch, heads, tokens, head_dim]`, with the heads of a token next to one another."""
    batch, heads, tokens, size = x.shape
    return x.new_empty((batch, tokens, heads, size), dtype=dtype).transpose(1, 2)


def _launch(x: Tensor, cos: Tensor) -> dict[str, int]:
    """Return the sizes of the pieces that a program rotates at one time."""
    size, rotary = x.shape[-1], cos.shape[-1]
    half = max(16, _power(rotary // 2))
    rest = max(1, _power(size - rotary))
    fitting = max(1, TILE // _power(2 * half + rest))
    heads = min(HEADS, fitting, _power(x.shape[1]))
    return {"SIZE": size, "ROTARY": rotary, "HALF": half, "REST": rest, "HEADS": heads, "num_warps": 4}


def _power(size: int) -> int:
    """Return the smallest power of two that is not below a size; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


def _angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return cosines and sines that lie alike in memory, and their strides of batch and tokens.

    Angles of one row are used for every row.
    """
    sin = sin if sin.stride() == cos.stride() else sin.contiguous()
    cos = cos if sin.stride() == cos.stride() else cos.contiguous()
    return cos, sin, (0 if len(cos) == 1 else cos.stride(0), cos.stride(1))


def _empty(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, offset: float, rounds_first: bool
) -> Tensor:
    dtype = x.dtype if weight is None or not rounds_first else torch.promote_types(x.dtype, weight.dtype)
    return _by_token(x, torch.promote_types(dtype, cos.dtype))


@operator("rotated", _empty)
def _forward(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float, offset: float, rounds_first: bool
) -> Tensor:
    from rl_core.torch.kernels.layer_programs import rotary_forward

    out = _empty(x, cos, sin, weight, eps, offset, rounds_first)
    batch, heads, tokens, _ = x.shape
    cos, sin, of_angles = _angles(cos, sin)
    strides = *x.stride()[:3], *out.stride()[:3], *of_angles
    options = {"HAS_NORM": weight is not None, "OFFSET": offset, "ROUNDS_FIRST": rounds_first, **_launch(x, cos)}
    if out.numel():
        with torch.cuda.device_of(x):
            rotary_forward[(batch * tokens,)](x, cos, sin, weight, out, heads, tokens, *strides, eps, **options)
    return out


def _backward_empty(grad: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _by_token(grad, others[-1]), grad.new_empty(grad.shape[-1], dtype=torch.float32)


@operator("rotated_backward", _backward_empty)
def _backward(
    grad: Tensor,
    x: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    rounds_first: bool,
    needs_weight: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from rl_core.torch.kernels.layer_programs import rotary_backward

    by_x = _by_token(grad, dtype)
    batch, heads, tokens, size = grad.shape
    cos, sin, of_angles = _angles(cos, sin)
    programs = num_programs(grad.device, batch * tokens)
    parts = grad.new_zeros((programs if needs_weight else 0, size), dtype=torch.float32)
    sizes = heads, tokens, batch * tokens
    strides = *grad.stride()[:3], *(x.stride()[:3] if x is not None else (0, 0, 0)), *by_x.stride()[:3], *of_angles
    options = {"HAS_NORM": weight is not None, "NEEDS_WEIGHT": needs_weight, "OFFSET": offset, **_launch(grad, cos)}
    if by_x.numel():
        program = rotary_backward[(programs,)]
        with torch.cuda.device_of(grad):
            program(grad, x, cos, sin, weight, by_x, parts, *sizes, *strides, eps, **options, ROUNDS_FIRST=rounds_first)
    return by_x, parts.sum(0)
