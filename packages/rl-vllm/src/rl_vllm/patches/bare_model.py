"""An engine's model without the layers that apply adapters.

- Fault: vLLM wraps every layer that can have an adapter, and the layer's parameters get another name
  (`proj.base_layer.weight`). Loaders that look up `proj.weight` by name fail or skip it.
- vLLM 0.32.0, `vllm/lora/layers/base.py`.
- Upstream: https://github.com/vllm-project/vllm/issues/39934 (open): a reload of weights with adapters enabled raises
  `KeyError` for this reason. `BaseLayerWithLoRA.load_weights` helps only models that load layer by layer.
- Delete when `tests/patches/test_bare_model.py::test_vllm_puts_the_parameters_of_a_wrapped_layer_under_another_name`
  fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Take off the layers that vLLM puts around a model's layers to apply adapters, and put them back afterwards."""
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
