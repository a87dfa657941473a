"""Quantisation-aware training: linear layers that compute with the weights that an engine will serve.

The weight is rounded in the forward pass and, from the exact weight that FSDP gathers anyway, again in the backward
pass, so that no rounded copy is kept in between. Its gradient is that by the rounded weight (straight-through).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from rl_core.torch.quantization.formats import Float8Format, WeightFormat, rounded, weight_format
from rl_dtensor.config import DTensorConfig, QATConfig
from rl_dtensor.model.linear import chosen_linear_layers
from rl_dtensor.parallel.plan import plan_of

logger = logging.getLogger(__name__)

KEY = "dtensor_cfg.qat"


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its weight rounded to a format."""

    weight_format: WeightFormat

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Product of `[..., inputs]` and the rounded weight, and the bias."""
        out: Tensor = _RoundedProduct.apply(input, self.weight, self.bias, self.weight_format)
        return out


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fmt: WeightFormat) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fmt, ctx.has_bias = fmt, bias is not None
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
    chosen = chosen_linear_layers(
        hf,
        layers,
        num_first=config.num_first_layers_in_bf16,
        num_last=config.num_last_layers_in_bf16,
        exclude=config.exclude_modules,
        kept=kept,
        key=KEY,
    )
    fmt = weight_format(config.format, config.group_size)
    for name, module in chosen.items():
        _check_width(name, module.in_features, fmt, "inputs")
        module.__class__ = RoundedLinear
        cast("RoundedLinear", module).weight_format = fmt
    kinds = Counter(name.rpartition(".")[2] for name in chosen)
    logger.info("weights rounded to %s: %s", fmt.name, ", ".join(f"{n} {kind}" for kind, n in kinds.items()))


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
            module.weight_format = replace(module.weight_format, largest=_LargestOfRanks(mesh.get_group()))


def check_rounding(hf: PreTrainedModel, layers: Sequence[nn.Module], backend: DTensorConfig) -> None:
    """Raise what `round_weights` and `fit_to_ranks` raise, without ranks.

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


def _check_share(name: str, module: RoundedLinear, size: int) -> None:
    if module.in_features % size:
        raise ValueError(f"{KEY}: {name} has {module.in_features} inputs, which {size} ranks cannot share")
    share = f"inputs of each of {size} tensor-parallel ranks"
    _check_width(name, module.in_features // size, module.weight_format, share)


class _LargestOfRanks:
    """The largest absolute value of each row over all ranks that have a part of it; collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, largest: Tensor) -> Tensor:
        shared = largest.clone()
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return shared


def _check_width(name: str, width: int, fmt: WeightFormat, what: str) -> None:
    if fmt.group_size and width % fmt.group_size:
        advice = "choose a group_size that does" if fmt.name == "int4" else "choose another format"
        raise ValueError(
            f"{KEY}: groups of {fmt.group_size} do not fill the {width} {what} of {name}; {advice}, or name the layer "
            "in exclude_modules"
        )
    if width % fmt.step:
        raise ValueError(
            f"{KEY}: files of {fmt.name} hold {fmt.step} values together, which does not divide the {width} {what} of "
            f"{name}; name the layer in exclude_modules"
        )


def formats_of(hf: PreTrainedModel) -> Mapping[str, WeightFormat]:
    """Format of each rounded weight of a model by its name; of whole rows, before `fit_to_ranks`."""
    modules = hf.named_modules()
    return {f"{name}.weight": module.weight_format for name, module in modules if isinstance(module, RoundedLinear)}
