"""Low-rank adapters on a model of transformers in one process, without peft."""

from __future__ import annotations

from typing import Any

import torch
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
        self.scale = config.alpha / config.dim
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
