"""Low-rank adapters on a model of transformers in one process, without peft."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig
from rl_core.torch.training.lora import initial_down, is_adapted

LINEAR = (nn.Linear.forward, Conv1D.forward)
"""Forward functions of linear layers; the weights of the second are transposed. Routers may inherit from the first, and
return more than its product."""


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter.

    Args:
        name: of the layer, which seeds the adapter.
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
        """Add the adapter to the weight that it sits on."""
        added = self.scale * self.up @ self.down
        self.base.weight += added.T if self.is_transposed else added


def adapt(model: Any, config: LoraConfig) -> None:
    """Put adapters on the linear layers of a model but its head, and freeze the rest."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module).forward in LINEAR and module is not head and is_adapted(name, config):
            model.set_submodule(name, AdaptedLinear(module, name, config))


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the adapters of a model to the weights that they sit on, and take them away."""
    for name, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            module.merge()
            model.set_submodule(name, module.base)


@torch.no_grad()
def merge_files(model: nn.Module, folder: Path) -> None:
    """Add the adapters in a folder of the format of `peft` to the weights of a model that they sit on.

    Raises:
        ValueError: if the folder names other layers than it holds factors of, or layers that the model does not have.
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
        and any(f".{name}".endswith(f".{target}") for target in config["target_modules"])
    }
    if named != layers:
        raise ValueError(f"{folder} names {sorted(named ^ layers)}, of which it has no factors, or has them unnamed")
    for layer in layers:
        weight: Any = model.get_submodule(layer).weight
        down, up = (factors.pop(f"{layer}.lora_{which}.weight").to(weight.dtype) for which in "AB")
        added = scale * up @ down
        weight += added.T if isinstance(model.get_submodule(layer), Conv1D) else added
    for name in config["modules_to_save"] or ():
        model.get_submodule(name).weight.copy_(factors.pop(f"{name}.weight"))
    if factors:
        raise ValueError(f"{folder} holds {sorted(factors)}, which belong to no adapter")
