"""An engine's model without the layers that apply adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Take off the layers that vLLM puts around those of a model to apply adapters: loaders know the model's own alone,
    under other names."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
