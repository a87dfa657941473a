"""Low-rank adapters on a model of transformers in one process, without peft."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, remove_parametrizations
from transformers.pytorch_utils import Conv1D

from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import initial_down, is_adapted, is_adapted_stack, refused_by_peft

LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of linear layers; the weights of the second are transposed. Routers may inherit from the first, and
return more than its product."""


class AdaptedExperts(nn.Module):
    """Adapters of a stacked weight, one for each expert, as a parametrization of it.

    Args:
        name: Name of the weight, which seeds the adapters.
        weight: `[experts, outputs, inputs]`, or `[experts, inputs, outputs]` if transposed.
    """

    def __init__(self, name: str, weight: Tensor, config: LoraConfig, *, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        num_experts, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
        self.scale = config.scale
        self.down = nn.Parameter(initial_down(name, (num_experts, config.dim, inputs), ModelSpec().seed).to(weight))
        self.up = nn.Parameter(weight.new_zeros(num_experts, outputs, config.dim))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weights with the adapters, expert by expert."""
        added = torch.stack([self.scale * up @ down for up, down in zip(self.up, self.down, strict=True)])
        return weight + (added.mT if self.is_transposed else added)


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter.

    Args:
        name: Name of the layer, which seeds the adapter.
    """

    def __init__(self, base: nn.Module, name: str, config: LoraConfig) -> None:
        super().__init__()
        self.base = base
        self.scale = config.scale
        weight: Any = base.weight
        self.is_transposed = isinstance(base, Conv1D)
        outputs, inputs = weight.T.shape if self.is_transposed else weight.shape
        down = initial_down(f"{name}.weight", (config.dim, inputs), ModelSpec().seed)
        self.down = nn.Parameter(down.to(weight.dtype))
        self.up = nn.Parameter(weight.new_zeros(outputs, config.dim))

    def forward(self, hidden: Tensor) -> Tensor:
        """As the linear layer's."""
        out: Tensor = self.base(hidden) + self.scale * (hidden @ self.down.T @ self.up.T)
        return out

    def merge(self) -> None:
        """Add the adapter to its weight."""
        added = self.scale * self.up @ self.down
        weight: Any = self.base.weight
        weight += added.T if self.is_transposed else added


def adapt(model: Any, config: LoraConfig) -> None:
    """Put adapters on the linear layers of a model but its head, and on stacked experts, and freeze the rest."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if type(module).forward in LINEAR and module is not head and is_adapted(name, config)
    ]
    refused = refused_by_peft(model, layers) if config.match_all_linear else set()
    for name in (layer for layer in layers if layer not in refused):
        model.set_submodule(name, AdaptedLinear(model.get_submodule(name), name, config))
    for name, weight in list(model.named_parameters()):
        if is_adapted_stack(name, config):
            owner, _, short = name.rpartition(".")
            experts = model.get_submodule(owner)
            adapters = AdaptedExperts(name, weight, config, is_transposed=_is_transposed(experts))
            register_parametrization(experts, short, adapters)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters of a model to their weights, and take them away."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            module.merge()
            model.set_submodule(name, module.base)
    for module in list(model.modules()):
        if is_parametrized(module):
            for short in list(cast("nn.ModuleDict", module.parametrizations)):
                remove_parametrizations(module, short)


@torch.no_grad()
def merge_files(model: nn.Module, folder: Path) -> None:
    """Add the adapters in a folder of the format of `peft` to the weights of a model.

    Raises:
        ValueError: If the folder lists other layers than it has factors of, or layers that the model does not have.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    factors = {
        name.removeprefix("base_model.model."): factor
        for name, factor in load_file(folder / "adapter_model.safetensors").items()
    }
    layers = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    named = {
        name
        for name, module in model.named_modules()
        if type(module).forward in LINEAR
        and (
            any(f".{name}".endswith(f".{target}") for target in config["target_modules"])
            or f"{name}.weight" in (config.get("target_parameters") or ())
        )
    }
    stacks = _wrapped_parameters(model, config.get("target_parameters") or ())
    if named | stacks.keys() != layers:
        odd = sorted((named | stacks.keys()) ^ layers)
        raise ValueError(f"{folder} lists {odd} without factors, or has factors of them without listing them")
    for layer, stack in stacks.items():
        down, up = (factors.pop(f"{layer}.lora_{which}.weight").to(stack.dtype) for which in "AB")
        for expert, stacked in enumerate(stack):
            rows = slice(expert * config["r"], (expert + 1) * config["r"])
            stacked += scale * up[:, expert :: len(stack)] @ down[rows]
    for layer in named:
        weight: Any = model.get_submodule(layer).weight
        down, up = (factors.pop(f"{layer}.lora_{which}.weight").to(weight.dtype) for which in "AB")
        added = scale * up @ down
        weight += added.T if isinstance(model.get_submodule(layer), Conv1D) else added
    for name in config["modules_to_save"] or ():
        cast("Tensor", model.get_submodule(name).weight).copy_(factors.pop(f"{name}.weight"))
    if factors:
        raise ValueError(f"{folder} holds {sorted(factors)}, which belong to no adapter")


def _is_transposed(experts: Any) -> bool:
    return bool(getattr(experts, "is_transposed", False))


def _wrapped_parameters(model: nn.Module, targets: Sequence[str]) -> dict[str, Tensor]:
    """Return the wrappers, by name, that peft puts around a module for its stacked parameters, the last one's
    outermost, to these as `[experts, outputs, inputs]`.

    Args:
        model: Model without the wrappers.
        targets: Parameters by full name.
    """
    wrapped: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        own = [
            parameter
            for short, parameter in module.named_parameters(recurse=False)
            if f"{name}.{short}" in targets and short != "weight"
        ]
        for depth, parameter in enumerate(reversed(own)):
            wrapped[name + ".base_layer" * depth] = parameter.mT if _is_transposed(module) else parameter
    return wrapped
