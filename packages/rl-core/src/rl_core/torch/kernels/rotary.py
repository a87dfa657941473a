"""Rotary embeddings of heads, with a norm of each head before them or without."""

from __future__ import annotations

from functools import lru_cache
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
    out: Tensor = _Rotation.apply(by_head, None, cos, sin, weight, None, form)[0]
    return out if heads_dim == 1 else out.transpose(1, 2)


def rotated_pair(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[HeadNorm | None, HeadNorm | None] = (None, None),
    *,
    heads_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys as `rotated` does, by one program on GPUs.

    Args:
        query: `[batch, heads, tokens, head_dim]`.
        key: The same, of any number of heads.
        cos: Cosines, as for `rotated`.
        sin: Sines.
        norms: Norm of each head of queries, and of keys.
        heads_dim: 2 if the heads are behind the tokens.
    """
    both = list(zip((query, key), norms, strict=True))
    (weight, form), (key_weight, key_form) = ((None, None) if norm is None else norm for norm in norms)
    takes_both = form == key_form and query.shape[-1] == key.shape[-1] and query.dtype == key.dtype
    takes_both &= weight is None or key_weight is None or weight.dtype == key_weight.dtype
    if not takes_both or not all(_takes_rotation(x, cos, sin, norm, heads_dim) for x, norm in both):
        turned, key = (rotated(x, cos, sin, norm, heads_dim=heads_dim) for x, norm in both)
        return turned, key
    if heads_dim == 2:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    query, key = _Rotation.apply(query, key, cos, sin, weight, key_weight, form)
    return (query, key) if heads_dim == 1 else (query.transpose(1, 2), key.transpose(1, 2))


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
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        weight: Tensor | None,
        other_weight: Tensor | None,
        form: NormForm | None,
    ) -> tuple[Tensor, Tensor]:
        x, other, cos, sin = dense(x), None if other is None else dense(other), dense(cos), dense(sin)
        ctx.form, ctx.dtype, ctx.is_pair = form, x.dtype, other is not None
        # Without a norm the gradient depends only on the angles.
        kept = (None, None) if form is None else (x, other)
        ctx.save_for_backward(*kept, cos, sin, weight, other_weight)
        out, turned = torch.ops.rl_core.rotated(x, other, cos, sin, weight, other_weight, *_settings(form))
        if other is None:  # Compilers do not take None for a result.
            ctx.mark_non_differentiable(turned)
        return out, turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor, by_other: Tensor) -> tuple[Tensor | None, ...]:
        x, other, cos, sin, weight, other_weight = ctx.saved_tensors
        needs_weight = ctx.needs_input_grad[4] or ctx.needs_input_grad[5]
        given = dense(grad), dense(by_other) if ctx.is_pair else None
        settings = *_settings(ctx.form), needs_weight, ctx.dtype
        by_x, by_second, by_weights = torch.ops.rl_core.rotated_backward(
            *given, x, other, cos, sin, weight, other_weight, *settings
        )
        by_weight, by_other_weight = None, None
        if needs_weight:
            by_weight, *others = by_weights.to(weight.dtype).unbind()
            by_other_weight = others[0] if others else None
        return (
            by_x,
            by_second if ctx.is_pair else None,
            None,
            None,
            by_weight if ctx.needs_input_grad[4] else None,
            by_other_weight if ctx.needs_input_grad[5] else None,
            None,
        )


def _settings(form: NormForm | None) -> tuple[float, float, bool]:
    return (0.0, 0.0, False) if form is None else (form.eps, form.offset, form.rounds_first)


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for `[batch, heads, tokens, head_dim]`, with the heads of a token next to one another."""
    batch, heads, tokens, size = x.shape
    return x.new_empty((batch, tokens, heads, size), dtype=dtype).transpose(1, 2)


@lru_cache(maxsize=64)
def _launch(size: int, rotary: int, *heads: int) -> dict[str, int]:
    """Return the sizes of the pieces that a program rotates at one time, of each of two numbers of heads."""
    half = max(16, _power(rotary // 2))
    rest = max(1, _power(size - rotary))
    fitting = max(1, TILE // _power(2 * half + rest))
    own, other = (min(HEADS, fitting, _power(num)) for num in heads)
    sizes = {"SIZE": size, "ROTARY": rotary, "HALF": half, "REST": rest}
    return {**sizes, "HEADS": own, "OTHER_HEADS": other, "num_warps": 4}


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
    x: Tensor,
    other: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    other_weight: Tensor | None,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if weight is None or not rounds_first else torch.promote_types(x.dtype, weight.dtype)
    dtype = torch.promote_types(dtype, cos.dtype)
    return _by_token(x, dtype), x.new_empty(0) if other is None else _by_token(other, dtype)


@operator("rotated", _empty)
def _forward(
    x: Tensor,
    other: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    other_weight: Tensor | None,
    eps: float,
    offset: float,
    rounds_first: bool,
) -> tuple[Tensor, Tensor]:
    from rl_core.torch.kernels.layer_programs import rotary_forward

    out, turned = _empty(x, other, cos, sin, weight, other_weight, eps, offset, rounds_first)
    if not out.numel():
        return out, turned
    batch, heads, tokens, size = x.shape
    cos, sin, of_angles = _angles(cos, sin)
    # Without other heads, the programs of the second column do not exist.
    second = (x, out) if other is None else (other, turned)
    tensors = x, second[0], cos, sin, weight, other_weight if other_weight is not None else weight, out, second[1]
    strides = [stride for each in (x, out, *second) for stride in each.stride()[:3]]
    sizes = heads, second[0].shape[1], tokens
    options = {"HAS_NORM": weight is not None, "OFFSET": offset, "ROUNDS_FIRST": rounds_first}
    launch = _launch(size, cos.shape[-1], *sizes[:2])
    with torch.cuda.device_of(x):
        program = rotary_forward[(batch * tokens, 1 if other is None else 2)]
        program(*tensors, *sizes, *strides, *of_angles, eps, **options, **launch)
    return out, turned


def _backward_empty(grad: Tensor, by_other: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype: torch.dtype = others[-1]
    second = grad.new_empty(0) if by_other is None else _by_token(by_other, dtype)
    columns = 1 if by_other is None else 2
    return _by_token(grad, dtype), second, grad.new_empty((columns, grad.shape[-1]), dtype=torch.float32)


@operator("rotated_backward", _backward_empty)
def _backward(
    grad: Tensor,
    by_other: Tensor | None,
    x: Tensor | None,
    other: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None,
    other_weight: Tensor | None,
    eps: float,
    offset: float,
    rounds_first: bool,
    needs_weight: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    from rl_core.torch.kernels.layer_programs import rotary_backward

    by_x = _by_token(grad, dtype)
    by_second = grad.new_empty(0) if by_other is None else _by_token(by_other, dtype)
    batch, heads, tokens, size = grad.shape
    programs, columns = num_programs(grad.device, batch * tokens), 1 if by_other is None else 2
    if not by_x.numel():
        return by_x, by_second, grad.new_zeros((columns, size), dtype=torch.float32)
    # Every program writes its part.
    parts = grad.new_empty((columns, programs if needs_weight else 0, size), dtype=torch.float32)
    cos, sin, of_angles = _angles(cos, sin)
    second = (grad, x, by_x) if by_other is None else (by_other, other, by_second)
    tensors = grad, second[0], x, second[1], cos, sin, weight, other_weight if other_weight is not None else weight
    sizes = heads, second[0].shape[1], tokens, batch * tokens
    strides = [
        stride for each in (grad, x, by_x, *second) for stride in ((0, 0, 0) if each is None else each.stride()[:3])
    ]
    options = {"HAS_NORM": weight is not None, "NEEDS_WEIGHT": needs_weight, "OFFSET": offset}
    launch = _launch(size, cos.shape[-1], *sizes[:2])
    with torch.cuda.device_of(grad):
        program = rotary_backward[(programs, columns)]
        results = by_x, second[2], parts
        program(*tensors, *results, *sizes, *strides, *of_angles, eps, **options, **launch, ROUNDS_FIRST=rounds_first)
    return by_x, by_second, parts.sum(1)
