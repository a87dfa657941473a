"""Linear layers whose products, forward and backward, torchao computes on 8-bit values with dynamic scales.

Weights stay as they are: each pass quantises the tensors that FSDP gathered, and quantises inputs and gradients as they
come. So master weights, optimizer, checkpoints and weight sync know nothing of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from rl_dtensor.config import Float8Config
from rl_dtensor.model.linear import chosen_linear_layers

logger = logging.getLogger(__name__)

KEY = "dtensor_cfg.float8"
MULTIPLE = 16
"""Rows, columns and tokens of the kernels' operands come in multiples of it."""
CAPABILITY = (8, 9)
"""Lowest compute capability whose tensor cores multiply 8-bit floating point."""


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
    chosen = chosen_linear_layers(
        hf,
        layers,
        num_first=config.num_first_layers_in_bf16,
        num_last=config.num_last_layers_in_bf16,
        exclude=config.exclude_modules,
        kept=kept,
        key=KEY,
    )
    unit = MULTIPLE * num_parts
    fitting = {name for name, each in chosen.items() if each.in_features % unit == each.out_features % unit == 0}
    if not fitting:
        raise ValueError(
            f"{KEY}: no linear layer of this {type(hf).__name__} has inputs and outputs in multiples of {unit} "
            f"({MULTIPLE} on each tensor-parallel rank); set {KEY}.enabled=false"
        )
    convert(hf, fitting, config)
    kinds = Counter(name.rpartition(".")[2] for name in fitting)
    how = "emulated in" if config.emulate else "computed in"
    logger.info("%s float8 (%s): %s", how, config.recipe, ", ".join(f"{n} {kind}" for kind, n in kinds.items()))
    if left := sorted(chosen.keys() - fitting):
        logger.info("not in float8, as sizes are not multiples of %d: %s", unit, ", ".join(left))


def convert(module: nn.Module, names: Set[str], config: Float8Config) -> None:
    """Replace the linear layers of these names inside a module by torchao's, with the same parameters."""
    # imports of several seconds, which other models do not pay
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = replace(Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
    convert_to_float8_training(module, config=recipe, module_filter_fn=lambda _, name: name in names)


def device_problem() -> str:
    """Return why this process cannot multiply in float8 by kernels; empty if it can."""
    if not torch.cuda.is_available():
        return (
            f"{KEY}.enabled needs GPUs of compute capability 8.9 or higher, and torch sees none; set "
            f"{KEY}.emulate=true to round as float8 does, without its speed"
        )
    found = torch.cuda.get_device_capability()
    if found < CAPABILITY:
        return (
            f"{KEY}.enabled needs GPUs of compute capability 8.9 or higher, and this one has {found[0]}.{found[1]}; "
            f"set {KEY}.emulate=true to round as float8 does, without its speed, or {KEY}.enabled=false"
        )
    return ""


def import_problem() -> str:
    """Return why torchao cannot be imported; empty if it can."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        return f"{KEY}.enabled needs torchao, which cannot be imported ({error}); install rl-dtensor[float8]"
    return ""
