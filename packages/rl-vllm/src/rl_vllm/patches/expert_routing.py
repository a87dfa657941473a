"""How vLLM chooses experts on CPU, in the cases that its router there leaves out.

- Fault: the router takes sigmoids, and biases that correct scores, into account only within groups of experts. Without
  groups it fails on sigmoids (MiniMax-M2), and ignores the bias of softmax scores without a message (ERNIE 4.5).
- vLLM 0.32.0, `vllm/model_executor/layers/fused_moe/router/cpu_router.py`.
- Upstream: no upstream issue found on 2026-11-26. https://github.com/vllm-project/vllm/pull/31246 (merged) added
  sigmoids and biases for GPUs.
- Delete when `tests/patches/test_expert_routing.py::test_vllms_router_on_cpu_leaves_out_sigmoids_and_biases` fails.
"""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk


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
        if not _is_left_out(self):
            return compute(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return _grouped_topk(
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            # of vLLM's routers without groups, that without a bias does not scale either
            routed_scaling_factor=1.0 if bias is None else self.routed_scaling_factor,
            e_score_correction_bias=bias,
        )

    CPURouter._compute_routing = compute_routing


def _is_left_out(router: CPURouter) -> bool:
    if router.use_grouped_topk or router.custom_routing_function is not None:
        return False
    has_bias = router.e_score_correction_bias is not None
    return router.scoring_func == "sigmoid" or (router.scoring_func == "softmax" and has_bias)
