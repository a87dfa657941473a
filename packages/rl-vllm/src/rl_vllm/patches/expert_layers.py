"""Expert layers that compute with a packed copy of their weights, loaded once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


@contextmanager
def packs_experts(model: nn.Module) -> Iterator[None]:
    """Have expert layers pack the weights that vLLM's reload brings them.

    vLLM's method packs stacked experts for its kernels on CPU when it makes the kernel, and only then: after a reload
    the layer would compute with weights in the layout of the checkpoint as if they were packed, or could not take them
    at all where packing pads them. So the kernel is made anew. A layer that was not loaded keeps the one it had.
    """
    kernels = {
        method: method.moe_kernel
        for module in model.modules()
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)
        and method.unquantized_backend is UnquantizedMoeBackend.CPU
    }
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel
