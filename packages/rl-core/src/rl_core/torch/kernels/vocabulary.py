"""Softmax over a vocabulary: statistics of logits that are read once, and the gradient written in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16
"""Triton's alignment: strides and sizes in multiples of it allow loads of 16 bytes."""

BLOCK = 4096
"""Logits of a row that a program holds at one time."""


@dataclass(frozen=True)
class LogitForm:
    """Conversion of products of hidden states and head to logits: `softcap * tanh(scale * x / softcap) / temperature`.

    Args:
        scale: Multiplies the products.
        softcap: Bounds the logits; None if they are not bounded.
        temperature: Divides the logits.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __call__(self, products: Tensor) -> Tensor:
        """Return logits over the temperature, in float32 or wider."""
        logits = products.to(torch.promote_types(products.dtype, torch.float32)) * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits / self.temperature


class SoftmaxStatistics(NamedTuple):
    """Per row, with z the logits over the temperature, float32 `[n]`.

    Args:
        largest: Largest logit m.
        total: Sum of exp(z - m).
        weighted: Sum of exp(z - m) (z - m).
        squares: Sum of exp(z - m)^2; zeros unless asked for.
    """

    largest: Tensor
    total: Tensor
    weighted: Tensor
    squares: Tensor

    def shifted(self, largest: Tensor) -> SoftmaxStatistics:
        """Return the same with another number in place of m, which must not be below it."""
        rise = self.largest - largest
        factor = rise.exp()
        return SoftmaxStatistics(
            largest, factor * self.total, factor * (self.weighted + rise * self.total), factor.square() * self.squares
        )


def head_products(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the products of hidden states and head, `[n, vocab]`, for the functions of this module; without a
    gradient.

    Rows are padded in memory to multiples of `MULTIPLE` entries, so that kernels load 16 bytes at a time whatever the
    size of the vocabulary is.
    """
    size = len(weight)
    if size % MULTIPLE == 0:
        return F.linear(hidden, weight, bias)
    products = hidden.new_empty((len(hidden), size + -size % MULTIPLE))[:, :size]
    if bias is None:
        return torch.mm(hidden, weight.T, out=products)
    return torch.addmm(bias, hidden, weight.T, out=products)


def softmax_statistics(products: Tensor, form: LogitForm, *, squares: bool = False) -> SoftmaxStatistics:
    """Return the statistics of the softmax of each row, from one read of it.

    Args:
        products: `[n, vocab]`, of hidden states and head.
        form: Conversion to logits.
        squares: True to sum squares as well.
    """
    found = torch.ops.rl_core.softmax_statistics(products, form.scale, form.softcap, form.temperature, squares)
    return SoftmaxStatistics(*found.unbind(0))


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to a total, whose dtype may be wider.

    On GPUs the product is accumulated in the total. Elsewhere a tensor of the product's size is made if the dtypes
    differ.

    Args:
        total: `[n, m]`, changed in place.
        a: `[n, k]`.
        b: `[k, m]`, in the dtype of `a`.
    """
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type in ("cuda", "meta") and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


@torch.library.custom_op("rl_core::softmax_statistics", mutates_args=(), device_types=("cpu", "cuda"))
def _statistics(products: Tensor, scale: float, softcap: float | None, temperature: float, squares: bool) -> Tensor:
    from rl_core.torch.kernels.row_programs import softmax_statistics as program

    num, size = products.shape
    found = products.new_zeros((4, num), dtype=torch.float32)
    form = scale, 1.0 if softcap is None else softcap, temperature
    options = {"HAS_SOFTCAP": softcap is not None, "HAS_SQUARES": squares, **_launch(size)}
    if num:
        with torch.cuda.device_of(products):
            sizes = num, size, _width(products), products.stride(0)
            program[(num,)](products, found, *sizes, *form, **options)
    return found


@_statistics.register_fake
def _empty_statistics(products: Tensor, *_: Any) -> Tensor:
    return products.new_empty((4, len(products)), dtype=torch.float32)


@torch.library.custom_op("rl_core::softmax_gradient_", mutates_args=("products",), device_types=("cpu", "cuda"))
def _gradient_(
    products: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    log_sum: Tensor,
    by_logprobs: Tensor,
    entropy: Tensor | None,
    by_entropy: Tensor | None,
    collision: Tensor | None,
    by_collision: Tensor | None,
    columns: Tensor,
    by_columns: Tensor,
) -> None:
    """Replace products `[n, vocab]` of hidden states and head by the gradient of the loss by them, in their dtype.

    Args:
        products: From `head_products`; changed in place.
        scale: Multiplies the products.
        softcap: Bounds the logits; None if they are not bounded.
        temperature: Divides the logits.
        log_sum: `[n]`, logarithm of the sum of the exponentials.
        by_logprobs: `[n]`, sum of the gradients by all logprobs that were read.
        entropy: `[n]`, in nats; None if it was not read.
        by_entropy: `[n]`, gradient by the entropy; None if it was not read.
        collision: `[n]`, sum of squared probabilities; None if it was not read.
        by_collision: `[n]`, gradient by the collision; None if it was not read.
        columns: Int64 `[n, k]`, tokens whose logprobs were read; one may be there twice.
        by_columns: `[n, k]`, gradients by their logprobs.
    """
    from rl_core.torch.kernels.row_programs import softmax_gradient

    num, size = products.shape
    if not products.numel():
        return
    shape = _launch(size)
    of_rows = [log_sum, entropy, by_entropy, collision, by_collision, by_logprobs]
    of_rows = [None if each is None else each.contiguous() for each in of_rows]
    sizes = columns.shape[1], _width(products), products.stride(0)
    form = scale, 1.0 if softcap is None else softcap, temperature
    has = {"HAS_ENTROPY": entropy is not None, "HAS_COLLISION": collision is not None}
    options = {"HAS_SOFTCAP": softcap is not None, **has, **shape}
    with torch.cuda.device_of(products):
        program = softmax_gradient[(num, -(-size // shape["BLOCK"]))]
        program(products, *of_rows, columns, by_columns, *sizes, *form, **options)


@_gradient_.register_fake
def _no_result(*_: Any) -> None:
    return None


def _width(products: Tensor) -> int:
    """Return the number of columns that kernels may touch: with the padding of `head_products`, if the rows have it."""
    size, stride = products.shape[1], products.stride(0)
    has_room = products.untyped_storage().nbytes() // products.itemsize >= len(products) * stride
    is_padded = stride == size + -size % MULTIPLE and products.storage_offset() == 0
    return stride if is_padded and has_room else size


def _launch(size: int) -> dict[str, int]:
    block = min(BLOCK, max(16, 1 << (size - 1).bit_length()))
    return {"BLOCK": block, "num_warps": 8 if block == BLOCK else 4}
