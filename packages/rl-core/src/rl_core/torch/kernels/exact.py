"""Operators whose result for a row does not depend on the other rows of a call, nor on their number.

Kernels choose their order of sums by the shape of a call, so a token that is decoded alone has other bits than the same
token among the rows of a training pass. Inside `exact_rows` the operators below are called only in shapes in which that
order is the same. Trainer and generator enter it for their forward passes; backward passes run outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 16
"""Rows and columns of a matrix product are padded to a multiple of this. BLAS libraries have kernels of their own for
vectors and narrow matrices, which add in another order."""

VECTOR = 64
"""Elements of a function are padded to a multiple of this: the last elements of a tensor that do not fill a vector
register are computed one by one, with another implementation of the exponential."""

CHUNK = 32768
"""Maximum number of elements in one call of a function. Torch splits larger calls over threads, at any element."""

_active: ContextVar[bool] = ContextVar("exact_rows", default=False)


@contextmanager
def exact_rows() -> Iterator[None]:
    """Compute every row alike, whatever is computed with it, until the context ends."""
    token = _active.set(True)
    try:
        with _ExactRows():
            yield
    finally:
        _active.reset(token)


def computes_exact_rows() -> bool:
    """Return whether `exact_rows` is entered."""
    return _active.get()


class _ExactRows(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (compute := _OPERATORS.get(func)) is not None:
            return compute(func, *args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Composite operators arrive whole, because autograd, which takes them apart, is left out.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        return func(*args, **kwargs)


def _product(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """Multiply `[..., n, k]` by `[..., k, m]`."""
    rows, columns = a.shape[-2], b.shape[-1]
    if not rows or not columns:
        return func(a, b)
    missing = -rows % ROWS
    a = F.pad(a, (0, 0, 0, missing)) if missing else a
    b = F.pad(b, (0, ROWS - columns)) if columns < ROWS else b
    result: Tensor = func(a, b)
    return result[..., :rows, :columns].contiguous() if missing or columns < ROWS else result


def _product_and_bias(func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Multiply, then add the bias, which a product in one call adds first or last by its shape."""
    product = _product(torch.ops.aten.mm.default, a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _elementwise(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a function of each element."""
    if not x.is_floating_point() or not x.numel():
        return func(x, *args, **kwargs)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % VECTOR), value=1.0)
    parts = [func(part, *args, **kwargs) for part in flat.split(CHUNK)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: x.numel()].view(x.shape)


def _in_place(function: Any) -> Callable[..., Tensor]:
    def compute(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(_elementwise(function, x, *args, **kwargs))

    return compute


def _row_sum(
    func: Any, x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum over the last dim. A single row is computed as two, because threads share the elements of one."""
    is_last = dim is not None and list(dim) in ([-1], [x.dim() - 1])
    if not is_last or x.dim() == 0 or not x.numel():
        return func(x, dim, keepdim, dtype=dtype)
    rows = x.reshape(-1, x.shape[-1])
    found: Tensor = func(rows if len(rows) > 1 else rows.repeat(2, 1), [-1], False, dtype=dtype)
    shape = (*x.shape[:-1], 1) if keepdim else x.shape[:-1]
    return found[: len(rows)].reshape(shape)


_aten: Any = torch.ops.aten
_FUNCTIONS = [
    _aten.silu, _aten.sigmoid, _aten.gelu, _aten.softplus, _aten.mish, _aten.exp, _aten.expm1, _aten.log, _aten.log1p,
    _aten.tanh, _aten.cos, _aten.sin, _aten.erf, _aten.rsqrt,
]  # fmt: skip
_IN_PLACE = [_aten.silu_, _aten.sigmoid_, _aten.exp_, _aten.log_, _aten.tanh_, _aten.rsqrt_]

_OPERATORS: dict[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product_and_bias,
    _aten.sum.dim_IntList: _row_sum,
    _aten.mean.dim: _row_sum,
    _aten.pow.Tensor_Scalar: _elementwise,
    **{function.default: _elementwise for function in _FUNCTIONS},
    **{function.default: _in_place(getattr(_aten, function.__name__[:-1]).default) for function in _IN_PLACE},
}


@torch.no_grad()
def check_exact_rows(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, *, max_rows: int = 256, device: torch.device | str = "cpu"
) -> None:
    """Check that a device computes rows alike in this process, in the shapes of a model.

    Every entry of a product is a fixed sequence of operations on one row and one column, which depends on shapes and
    places and never on values, so random values show whether two calls have the same sequence.

    Args:
        shapes: Outputs and inputs of linear layers.
        dtype: Dtype that they compute in.
        max_rows: Rows of the largest call.
        device: Device that computes.

    Raises:
        ValueError: With the shape in which results depend on the call.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    with exact_rows():
        for outputs, inputs in sorted(set(shapes)):
            x, weight = drawn(max_rows, inputs), drawn(outputs, inputs)
            whole = F.linear(x, weight)
            half = outputs // 2
            shifted = weight.new_empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight)
            same = [
                torch.equal(whole[:1], F.linear(x[:1], weight)),
                torch.equal(whole[5:26], F.linear(x[5:26], weight)),
                torch.equal(whole, F.linear(x, shifted)),
                torch.equal(whole[:, half:], F.linear(x, weight[half:])),
            ]
            if not all(same):
                raise ValueError(
                    f"products of {inputs} inputs and {outputs} outputs depend on the number of rows or columns on "
                    "this machine, whatever shape they are computed in; set policy.generation.exact=false"
                )
        x = drawn(7, 96)
        for function in (F.silu, torch.exp, torch.sum, torch.log_softmax):
            args = () if function in (F.silu, torch.exp) else (-1,)
            if not torch.equal(function(x, *args)[3:4], function(x[3:4].clone(), *args)):
                raise ValueError(
                    f"{function.__name__} of a row depends on the other rows on this machine; "
                    "set policy.generation.exact=false"
                )
