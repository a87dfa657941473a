"""The work of one operation: its launches, and the memory that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ledger.costs import Costs, Work
from ledger.flash import inner_costs

Formula = Callable[..., Costs]
"""Costs of an operation from its arguments, and its result as the keyword `out`."""

NOTHING = Costs()

_aten = torch.ops.aten

_formulas: dict[Any, Formula] = {}

PRODUCTS = frozenset(
    {
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.mv,
        _aten.dot,
        _aten._grouped_mm,
        _aten._scaled_mm,
        _aten._scaled_grouped_mm,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    }
)
"""Operations that count as matrix products, in addition to those that `torch.utils.flop_counter` knows."""

PRODUCT_NAMESPACES = frozenset({"torch_attn", "flash_attn", "flash_attn_3"})
"""Namespaces of attention, in torch and in packages."""

ATTENTION = frozenset({"flex_attention", "flex_attention_backward"})
"""Higher-order operators of attention."""

TORCH_NAMESPACES = frozenset({"aten", "prim", "prims", "fsdp", "inductor", "c10d", "_c10d_functional", "_dtensor"})
"""Namespaces of torch, whose operations are one kernel each unless they have a formula."""

SHARDING = frozenset({_aten._foreach_copy_})
"""Copies of FSDP2 next to the operations in its own namespace: it casts the parameters of a unit into one buffer."""

_COPY_IN = "fsdp::all_gather_copy_in"
"""Fills this rank's part of a buffer and returns both; its schema does not say so."""

_BARE = frozenset(
    {
        _aten._unsafe_view,
        _aten._reshape_alias,
        _aten.empty,
        _aten.empty_like,
        _aten.empty_permuted,
        _aten.empty_strided,
        _aten.lift,
        _aten.lift_fresh,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten.record_stream,
        _aten.resize_,
        _aten.set_,
    }
)
"""Operations that change or make no data, although their schemas do not say so."""


def register_cost(*operations: Any) -> Callable[[Formula], Formula]:
    """Decorate the function that computes the costs of operations, such as custom ones (`torch.ops.NAMESPACE.NAME`).

    An operation of torch without a formula is one kernel, which reads its arguments and writes its results once.

    Args:
        *operations: Operations, as packets of all their overloads.
    """

    def decorate(formula: Formula) -> Formula:
        for operation in operations:
            if operation in _formulas:
                raise ValueError(f"{operation} already has a formula of its costs; register it once")
            _formulas[operation] = formula
        return formula

    return decorate


def costs_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Costs:
    """Return the costs of the work of an operation; nothing for operations that launch none.

    Args:
        operation: An overload, or a higher-order operator.
        args: Positional arguments.
        kwargs: Keyword arguments.
        out: Result.

    Raises:
        ValueError: If the operation is not one of torch or of attention and has no formula.
    """
    if not isinstance(operation, torch._ops.OpOverload):
        if operation.name() not in ATTENTION:
            raise ValueError(f"{operation} is a higher-order operator whose costs the ledger does not know")
        return _product(operation, args, kwargs, out, _traffic(tensors_in((args, kwargs)), tensors_in(out)))
    packet = operation._overloadpacket
    if packet in _formulas:
        return _formulas[packet](*args, **kwargs, out=out)
    if operation.namespace not in TORCH_NAMESPACES | PRODUCT_NAMESPACES:
        raise ValueError(
            f"{operation} has no formula of its costs; register one with `ledger.operations.register_cost`, by the "
            "kernels that it launches and the memory that they touch"
        )
    if not _launches(operation, out):
        return NOTHING
    if operation._schema.name == _COPY_IN:
        return Costs(sharding=Work(1, _traffic(tensors_in(args[0]), [out[0]])))
    read, written = _touched(operation, args, kwargs, out)
    moved = _traffic(read, written)
    if operation.namespace in PRODUCT_NAMESPACES:
        return _product(packet, args, kwargs, out, moved) + inner_costs(operation, args)
    if packet in PRODUCTS or packet in flop_registry:
        return _product(packet, args, kwargs, out, moved)
    if packet in SHARDING or operation.namespace == "fsdp":
        return Costs(sharding=Work(1, moved))
    return Costs(other=Work(1, moved))


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's data; values that are repeated by expansion count once."""
    count = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= extent if stride else min(extent, 1)
    return count


def _launches(operation: torch._ops.OpOverload, out: Any) -> bool:
    if operation.is_view or operation._overloadpacket in _BARE or torch.Tag.inplace_view in operation.tags:
        return False
    return bool(tensors_in(out)) or operation._schema.is_mutable


def _touched(
    operation: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and the tensors that it writes."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for argument, value in _bound(operation, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += tensors_in(value)
        if not (is_written and argument.is_out):
            read += tensors_in(value)
    returns = operation._schema.returns
    for described, value in zip(returns, [out] if len(returns) == 1 else out or (), strict=True):
        if described.alias_info is None:
            written += tensors_in(value)
    return read, written


def _bound(
    operation: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(operation._schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _traffic(read: Iterable[Tensor], written: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors that are read, each once, and of the tensors that are written."""
    return sum(map(num_bytes, {id(tensor): tensor for tensor in read}.values())) + sum(map(num_bytes, written))


def _product(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, moved: int) -> Costs:
    # formulas take no dtype of the result, which some overloads have
    args = [each for each in args if not isinstance(each, torch.dtype)]
    flops = flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0
    if packet is _aten._grouped_mm:
        flops = _grouped_flops(*args)
    return Costs(products=Work(1, moved), flops=int(flops))


def _grouped_flops(left: Tensor, right: Tensor, *_: Any) -> int:
    """Return the operations of products of groups, if the groups are as large as all of the dim that they divide."""
    both = left.dim() == right.dim()
    if left.dim() == 2 or both:  # groups divide the rows, or the dim that is summed, or are a batch
        return 2 * left.numel() * right.shape[-1]
    return 2 * left.shape[1] * right.numel()  # groups divide the columns


def _only_written(*args: Any, out: Any, **kwargs: Any) -> Costs:
    written = _traffic((), tensors_in(out))
    return Costs(other=Work(1, written)) if written else NOTHING


def _gathered(*args: Any, out: Any, **kwargs: Any) -> Costs:
    """Return the costs of reading as much of the source as there are results."""
    return Costs(other=Work(1, _traffic(tensors_in(args[1:]), [out, out])))


def _scattered(target: Tensor, *args: Any, out: Any, **kwargs: Any) -> Costs:
    """Return the costs of reading and writing as much of the target as there are values; it is copied first if it is
    not changed in place."""
    indices = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_floating_point()]
    values = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    changed = 2 * sum(map(num_bytes, values)) if values else num_bytes(target)
    copied = 0 if out is target else 2 * num_bytes(target)
    return Costs(other=Work(1 if out is target else 2, _traffic([*indices, *values], ()) + changed + copied))


def _copied(target: Any, source: Any, *_: Any, **__: Any) -> Costs:
    return Costs(other=Work(1, _traffic(tensors_in(source), tensors_in(target))))


register_cost(
    _aten.arange,
    _aten.fill_,
    _aten.full,
    _aten.full_like,
    _aten.new_full,
    _aten.new_ones,
    _aten.new_zeros,
    _aten.ones,
    _aten.ones_like,
    _aten.zero_,
    _aten.zeros,
    _aten.zeros_like,
)(_only_written)
register_cost(_aten.embedding, _aten.gather, _aten.index, _aten.index_select)(_gathered)
register_cost(
    _aten.index_add,
    _aten.index_add_,
    _aten.index_copy,
    _aten.index_copy_,
    _aten.index_put,
    _aten.index_put_,
    _aten.scatter,
    _aten.scatter_,
    _aten.scatter_add,
    _aten.scatter_add_,
)(_scattered)
register_cost(_aten.copy_)(_copied)
