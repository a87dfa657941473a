"""Layers of experts on CPU. vLLM 0.32.0 has three faults in them.

Expert layers compute with a packed copy of their weights, also after a reload:

- Fault: on CPU vLLM's method packs stacked experts for its kernels only when it makes the kernel. After a reload the
  layer would compute with weights in the layout of the checkpoint as if they were packed, or could not take them at all
  where packing pads them.
- vLLM 0.32.0, `vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py`.
- Upstream: https://github.com/vllm-project/vllm/pull/40390 (merged) makes the kernel only once, so that later loads
  keep the addresses of tensors; https://github.com/vllm-project/vllm/issues/48312 (open) tracks wrong weights after
  reloads. No issue about CPU found on 2026-11-26.
- Delete when `tests/patches/test_expert_layers.py::test_vllms_method_packs_only_when_it_makes_the_kernel` fails.

The router leaves out some choices of experts:

- Fault: the router takes sigmoids, and biases that correct scores, into account only within groups of experts. Without
  groups it fails on sigmoids (MiniMax-M2), and ignores the bias of softmax scores without a message (ERNIE 4.5).
- vLLM 0.32.0, `vllm/model_executor/layers/fused_moe/router/cpu_router.py`.
- Upstream: no upstream issue found on 2026-11-26. https://github.com/vllm-project/vllm/pull/31246 (merged) added
  sigmoids and biases for GPUs.
- Delete when `tests/patches/test_expert_routing.py::test_vllms_router_on_cpu_leaves_out_sigmoids_and_biases` fails.

Experts over several ranks are not told apart:

- Fault: the kernel on CPU takes the number of an expert for its place among the experts of this rank. It ignores the
  map between them, so a rank computes with other experts, or reads past its weights.
- vLLM 0.32.0, `vllm/model_executor/layers/fused_moe/experts/cpu_moe.py` (`CPUUnquantizedExperts.apply`).
- Upstream: https://github.com/vllm-project/vllm/issues/57837 (open) asks for expert parallelism on CPU.
- Delete when `tests/patches/test_expert_layers.py::test_vllms_kernel_takes_numbers_of_experts_for_places` fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


def complete_routing_on_cpu() -> None:
    """Make vLLM's router on CPU apply sigmoids, and biases that correct scores, to experts without groups: all experts
    as one group are the same choice.
    """
    compute = CPURouter._compute_routing

    @wraps(compute)
    def compute_routing(
        self: CPURouter,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        bias = self.e_score_correction_bias
        has_groups = self.use_grouped_topk or self.custom_routing_function is not None
        is_left_out = self.scoring_func == "sigmoid" or (self.scoring_func == "softmax" and bias is not None)
        if has_groups or not is_left_out:
            return compute(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return _grouped_topk(
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            # vLLM's router without groups and without a bias does not scale either.
            routed_scaling_factor=1.0 if bias is None else self.routed_scaling_factor,
            e_score_correction_bias=bias,
        )

    CPURouter._compute_routing = compute_routing


def leave_out_experts_of_other_ranks_on_cpu() -> None:
    """Make vLLM's layers of experts on CPU compute the experts of their rank only, by `expert_map`. The results of the
    other experts come from their ranks, and are added."""
    apply = CPUUnquantizedExperts.apply

    @wraps(apply)
    def apply_own(
        self: CPUUnquantizedExperts, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **others: Any
    ) -> None:
        if expert_map is not None:
            places = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(places < 0, 0)
            topk_ids = places.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    CPUUnquantizedExperts.apply = apply_own


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
