"""Expert layers that compute with a packed copy of their weights, loaded again.

- Fault: on CPU vLLM's method packs stacked experts for its kernels only when it makes the kernel. After a reload the
  layer would compute with weights in the layout of the checkpoint as if they were packed, or could not take them at all
  where packing pads them.
- vLLM 0.32.0, `vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py`.
- Upstream: https://github.com/vllm-project/vllm/pull/40390 (merged) makes the kernel only once, so that later loads
  keep the addresses of tensors; https://github.com/vllm-project/vllm/issues/48312 (open) tracks wrong weights after
  reloads. No issue about CPU found on 2026-11-26.
- Delete when `tests/patches/test_expert_layers.py::test_vllms_method_packs_only_when_it_makes_the_kernel` fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


@contextmanager
def packs_experts(model: nn.Module) -> Iterator[None]:
    """Make expert layers pack the weights that vLLM's reload brings them: the kernel is made again.

    A layer that was not loaded keeps the kernel that it had.
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
