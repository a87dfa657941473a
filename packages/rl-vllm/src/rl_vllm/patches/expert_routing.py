"""How vLLM chooses experts on CPU, in the cases that its router there leaves out."""

from __future__ import annotations

from functools import wraps

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter, _grouped_topk


def complete_routing_on_cpu() -> None:
    """Have vLLM's router on CPU know sigmoids, and biases that correct scores, where experts are not in groups.

    That router (0.32; fused_moe/router/cpu_router.py) takes both into account within groups of experts alone. Without
    groups it fails on sigmoids (MiniMax-M2), and leaves out the bias of softmax scores in silence (ERNIE 4.5). All
    experts as one group are the same choice. To be removed once it knows both, which a test looks for.
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
