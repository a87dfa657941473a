"""Linear layers that compute in fewer bits than the model's precision, if the config asks for it.

With float8, the products of layers, forward and backward, are computed on 8-bit values with dynamic scales. The weights
do not change: each pass rounds the tensors that FSDP gathered, and rounds inputs and gradients as they come. So master
weights, optimizer, checkpoints and weight sync do not change.

With quantisation-aware training, layers compute with the weights that an engine will serve. The weight is rounded in
the forward pass and, from the exact weight that FSDP gathers anyway, again in the backward pass, so that no rounded
copy is kept in between. Its gradient is the gradient by the rounded weight (straight-through).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from rl_core.facts.hf_config import num_experts_of
from rl_core.torch.kernels.float8 import (
    E4M3,
    E5M2,
    Float8Matrix,
    largest_of,
    product,
    rounded_columns,
    rounded_rows,
    rounded_whole,
)
from rl_core.torch.quantization.formats import Float8Format, WeightFormat, rounded, weight_format
from rl_core.torch.training.lora import ends_with
from rl_dtensor.config import DTensorConfig, Float8Config, Float8Recipe, QATConfig
from rl_dtensor.model.layers.quantized_base import BASE
from rl_dtensor.parallel.plan import plan_of

logger = logging.getLogger(__name__)

FLOAT8, QAT = "dtensor_cfg.float8", "dtensor_cfg.qat"
UNROUNDED: Float8Recipe = "rowwise_with_gw_hp"
"""Recipe that computes the gradients of weights from unrounded values."""
MULTIPLE = 16
"""Rows, columns and tokens of the operands of float8 kernels come in multiples of it."""
CAPABILITY = (8, 9)
"""Lowest compute capability whose tensor cores multiply 8-bit floating point."""


def lower_precision(hf: PreTrainedModel, layers: Sequence[nn.Module], backend: DTensorConfig, kept: Set[str]) -> None:
    """Make linear layers of a whole model on `meta` compute in float8, or with rounded weights.

    To be called after adapters are added and before the model is split.

    Args:
        hf: Model, changed in place.
        layers: Its repeated layers, in order.
        backend: Settings of the backend.
        kept: Names of parameters that stay float32.

    Raises:
        ValueError: If the settings do not fit the model.
    """
    if backend.qat.enabled:
        round_weights(hf, layers, backend.qat, kept)
    if backend.float8.enabled:
        use_float8(hf, layers, backend.float8, kept, num_parts=backend.tensor_parallel_size)


def token_multiple(backend: DTensorConfig) -> int:
    """Return the number that the tokens of a rank's microbatch must be a multiple of.

    The gradient of a weight sums over tokens, and kernels sum over multiples.
    """
    return MULTIPLE if backend.float8.enabled and not backend.float8.emulate else 1


def use_float8(
    hf: PreTrainedModel, layers: Sequence[nn.Module], config: Float8Config, kept: Set[str], *, num_parts: int
) -> None:
    """Make linear layers of a model on `meta` compute in float8. Layers whose sizes the kernels do not take stay as
    they are.

    Args:
        hf: Whole model, not yet split or sharded, changed in place.
        layers: Its repeated layers, in order.
        config: Recipe, and layers to leave out.
        kept: Names of parameters that stay float32.
        num_parts: Number of tensor-parallel ranks, which may split any dim of a weight.

    Raises:
        ValueError: If this machine cannot compute in float8, or no layer is left.
    """
    problem = "" if config.emulate else device_problem()
    if problem:
        raise ValueError(problem)
    chosen = _chosen(hf, layers, config, kept, key=FLOAT8)
    unit = MULTIPLE * num_parts
    fitting = {name for name, each in chosen.items() if each.in_features % unit == each.out_features % unit == 0}
    if not fitting:
        raise ValueError(
            f"{FLOAT8}: no linear layer of this {type(hf).__name__} has inputs and outputs in multiples of {unit} "
            f"({MULTIPLE} on each tensor-parallel rank); set {FLOAT8}.enabled=false"
        )
    convert(hf, fitting, config)
    how = "emulated in" if config.emulate else "computed in"
    logger.info("%s float8 (%s): %s", how, config.recipe, _kinds_of(fitting))
    if left := sorted(chosen.keys() - fitting):
        logger.info("not in float8, as sizes are not multiples of %d: %s", unit, ", ".join(left))


def convert(module: nn.Module, names: Set[str], config: Float8Config) -> None:
    """Make the linear layers of these names inside a module compute in float8."""
    for name in names:
        linear = module.get_submodule(name)
        linear.__class__ = Float8Linear
        cast("Float8Linear", linear).float8 = config


def device_problem() -> str:
    """Return why this process cannot multiply in float8 by kernels; empty if it can."""
    needed = f"{FLOAT8}.enabled needs GPUs of compute capability 8.9 or higher"
    emulation = f"set {FLOAT8}.emulate=true to round as float8 does, without its speed"
    if not torch.cuda.is_available():
        return f"{needed}, and torch sees none; {emulation}"
    found = torch.cuda.get_device_capability()
    if found < CAPABILITY:
        return f"{needed}, and this one has {found[0]}.{found[1]}; {emulation}, or {FLOAT8}.enabled=false"
    return ""


class Float8Linear(nn.Linear):
    """A linear layer that multiplies 8-bit values, forward and backward.

    The recipes are the ones of torchao:

    - `tensorwise`: one scale for an operand. Gradients have 5 bits of exponent.
    - `rowwise`: a scale for each vector that a product sums over, which is a power of two.
    - `rowwise_with_gw_hp`: the same, except that gradients by weights multiply unrounded values. The gradient by inputs
      takes the weight with one scale.
    """

    float8: Float8Config

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply `[..., inputs]` with the weight and add the bias."""
        recipe = self.float8.recipe
        columns = torch.is_grad_enabled() and self.weight.requires_grad and recipe != UNROUNDED
        out = cast("Tensor", _Float8Product.apply(input, self.weight, self.float8, *_shared(input, recipe, columns)))
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, config: Float8Config, rows: Float8Matrix, columns: Float8Matrix | None
    ) -> Tensor:
        by_x, by_weight = ctx.needs_input_grad[:2]
        if config.recipe == "tensorwise":
            largest = largest_of(weight)
            rounded_weight, _ = rounded_whole(weight, largest, E4M3, columns=False)
        else:
            rounded_weight, largest = rounded_rows(weight, with_columns=by_x and config.recipe == "rowwise")
            if by_x and config.recipe == UNROUNDED:
                # Scales are powers of two, so the largest one of the rows is the scale of the whole weight.
                largest = (rounded_weight.scales.amax() * torch.finfo(E4M3).max).repeat(weight.shape[1])
        ctx.config, ctx.has_columns = config, columns is not None
        kept: tuple[Tensor, ...] = (x,) if columns is None else columns
        ctx.save_for_backward(weight, largest, *(kept if by_weight else ()))
        out = product(rows, rounded_weight, x.dtype, fast=True, emulate=config.emulate)
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, largest, *kept = ctx.saved_tensors
        by_x, by_weight = ctx.needs_input_grad[:2]
        config, given = ctx.config, grad.flatten(0, -2)
        rows, columns = _rounded(given, config.recipe, columns=ctx.has_columns and by_weight, kind=E5M2)
        found: list[Tensor | None] = [None, None]
        if by_x:
            if config.recipe == "tensorwise":
                _, turned = rounded_whole(weight, largest, E4M3, rows=False)
            else:
                turned = rounded_columns(weight, largest)
            found[0] = product(rows, turned, grad.dtype, emulate=config.emulate).view(*grad.shape[:-1], -1)
        if by_weight and columns is not None:
            found[1] = product(columns, Float8Matrix(*kept), grad.dtype, emulate=config.emulate)
        elif by_weight:
            found[1] = given.T @ kept[0].flatten(0, -2)
        return (*found, None, None, None)


_Operands = tuple[Float8Matrix, Float8Matrix | None]
"""A matrix for a product with a weight, and with rows and columns exchanged for the gradient by the weight."""

_latest: MutableMapping[Tensor, tuple[tuple[Float8Recipe, bool], _Operands]] = WeakTensorKeyDictionary()
"""The input that was rounded last, while it exists."""


@torch.no_grad()
def _shared(x: Tensor, recipe: Float8Recipe, columns: bool) -> _Operands:
    """Round an input `[..., features]`; the projections of an attention layer, which read the same tensor, share it."""
    if torch.compiler.is_compiling():
        return _rounded(x.flatten(0, -2), recipe, columns=columns)
    key, found = _latest.get(x, (None, None))
    if found is None or key != (recipe, columns):
        found = _rounded(x.flatten(0, -2), recipe, columns=columns)
        _latest.clear()
        _latest[x] = (recipe, columns), found
    return found


def _rounded(x: Tensor, recipe: Float8Recipe, *, columns: bool, kind: torch.dtype = E4M3) -> _Operands:
    """Round inputs or gradients.

    Args:
        x: `[tokens, features]`.
        recipe: Values that share a scale.
        columns: True to return the second operand.
        kind: Dtype of values that all share one scale.
    """
    if recipe == "tensorwise":
        rows, turned = rounded_whole(x, largest_of(x), kind, columns=columns)
        return rows, turned if columns else None
    rows, largest = rounded_rows(x, with_columns=columns)
    return rows, rounded_columns(rows, largest) if columns else None


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its weight rounded to a format."""

    weight_format: WeightFormat

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Multiply `[..., inputs]` with the rounded weight and add the bias."""
        return cast("Tensor", _RoundedProduct.apply(input, self.weight, self.bias, self.weight_format))


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fmt: WeightFormat) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fmt = fmt
        return F.linear(x, rounded(weight, fmt), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ rounded(weight, ctx.fmt) if by_x else None,
            rows.T @ x.flatten(0, -2) if by_weight else None,
            rows.sum(0) if by_bias else None,
            None,
        )


def round_weights(hf: PreTrainedModel, layers: Sequence[nn.Module], config: QATConfig, kept: Set[str]) -> None:
    """Make linear layers of a model on `meta` compute with rounded weights.

    Args:
        hf: Whole model, not yet split or sharded, changed in place.
        layers: Its repeated layers, in order.
        config: Format, and layers to leave out.
        kept: Names of parameters that stay float32.

    Raises:
        ValueError: If the format does not fit a layer, or no layer is left.
    """
    chosen = _chosen(hf, layers, config, kept, key=QAT)
    fmt = weight_format(config.format, config.group_size)
    for name, module in chosen.items():
        _check_width(name, module.in_features, fmt, "inputs")
        module.__class__ = RoundedLinear
        cast("RoundedLinear", module).weight_format = fmt
    logger.info("weights rounded to %s: %s", fmt.name, _kinds_of(chosen))


def fit_to_ranks(hf: PreTrainedModel) -> None:
    """Adapt the rounding of weights whose inputs are split over tensor-parallel ranks; after the split.

    Raises:
        ValueError: If a rank's part of a row ends inside a group.
    """
    for name, module in hf.named_modules():
        if not isinstance(module, RoundedLinear) or not isinstance(module.weight, DTensor):
            continue
        if module.weight.placements != (Shard(1),):
            continue
        mesh = module.weight.device_mesh
        _check_share(name, module, mesh.size())
        if isinstance(module.weight_format, Float8Format):
            module.weight_format = replace(
                module.weight_format, largest=partial(largest_of_ranks, group=mesh.get_group())
            )


def check_rounding(hf: PreTrainedModel, layers: Sequence[nn.Module], backend: DTensorConfig) -> None:
    """Raise the errors of `round_weights` and `fit_to_ranks`, without ranks.

    Args:
        hf: Whole model on `meta`, changed in place.
        layers: Its repeated layers, in order.
        backend: Settings of the backend.

    Raises:
        ValueError: If the format does not fit a layer, or a rank's part of one, or no layer is left.
    """
    round_weights(hf, layers, backend.qat, frozenset())
    size = backend.tensor_parallel_size
    plan = plan_of(hf, backend.custom_parallel_plan, layers) if size > 1 else {}
    for name, module in hf.named_modules():
        if isinstance(module, RoundedLinear) and plan.get(name) in ("rowwise", "rowwise_split_input"):
            _check_share(name, module, size)


def formats_of(hf: PreTrainedModel) -> Mapping[str, WeightFormat]:
    """Return the format of each rounded weight of a model by its name; for whole rows, before `fit_to_ranks`."""
    modules = hf.named_modules()
    return {f"{name}.weight": module.weight_format for name, module in modules if isinstance(module, RoundedLinear)}


def largest_of_ranks(largest: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest absolute value of each row over all ranks that have a part of it; collective."""
    shared = largest.clone()
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return shared


def _check_share(name: str, module: RoundedLinear, size: int) -> None:
    if module.in_features % size:
        raise ValueError(f"{QAT}: {name} has {module.in_features} inputs, which {size} ranks cannot share")
    share = f"inputs of each of {size} tensor-parallel ranks"
    _check_width(name, module.in_features // size, module.weight_format, share)


def _check_width(name: str, width: int, fmt: WeightFormat, part: str) -> None:
    if fmt.group_size and width % fmt.group_size:
        advice = "choose a group_size that does" if fmt.name == "int4" else "choose another format"
        raise ValueError(
            f"{QAT}: groups of {fmt.group_size} do not fill the {width} {part} of {name}; {advice}, or name the layer "
            "in exclude_modules"
        )
    if width % fmt.step:
        raise ValueError(
            f"{QAT}: files of {fmt.name} hold {fmt.step} values together, which does not divide the {width} {part} of "
            f"{name}; name the layer in exclude_modules"
        )


def _kinds_of(names: Set[str] | Mapping[str, nn.Linear]) -> str:
    kinds = Counter(name.rpartition(".")[2] for name in names)
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def _chosen(
    hf: PreTrainedModel, layers: Sequence[nn.Module], config: Float8Config | QATConfig, kept: Set[str], *, key: str
) -> dict[str, nn.Linear]:
    """Return linear layers by name, in the model's order, without the head, routers and adapters.

    Args:
        hf: Whole model.
        layers: Its repeated layers, in order.
        config: Layers to leave out.
        kept: Names of parameters that stay float32, whose layers are left out.
        key: Key of the section that chooses, for messages.

    Raises:
        ValueError: If a name in `exclude_modules` is not one of these layers, or nothing is left.
    """
    exclude = config.exclude_modules
    inside = {id(module): place for place, layer in enumerate(layers) for module in layer.modules()}
    # A router returns a score for each expert; a shared expert's gate returns one.
    of_routers = {1, num_experts_of(hf.config.get_text_config().to_dict())}
    found, plain = {}, {}
    for name, module in hf.named_modules():
        if id(module) not in inside or type(module).forward is not nn.Linear.forward or ".lora_" in name:
            continue
        assert isinstance(module, nn.Linear)
        file_name = name.replace(BASE, "")
        if module.out_features not in of_routers and f"{file_name}.weight" not in kept:
            found[name], plain[name] = module, file_name
    for ending in exclude:
        if not any(ends_with(each, [ending]) for each in plain.values()):
            known = sorted({each.rpartition(".")[2] for each in plain.values()})
            raise ValueError(
                f"{key}.exclude_modules: {ending!r} is not a linear layer of this {type(hf).__name__}; name some of "
                f"{', '.join(known)}"
            )
    chosen = {}
    for name, module in found.items():
        is_inner = config.num_first_layers_in_bf16 <= inside[id(module)] < len(layers) - config.num_last_layers_in_bf16
        if is_inner and not ends_with(plain[name], exclude):
            chosen[name] = module
    if not chosen:
        raise ValueError(
            f"{key} leaves no linear layer of the {len(layers)} layers of this {type(hf).__name__}; lower "
            f"num_first_layers_in_bf16 and num_last_layers_in_bf16, or set {key}.enabled=false"
        )
    return chosen
