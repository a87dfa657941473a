"""The choice of experts on CPU, where vLLM's router leaves cases out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

import rl_vllm.engine_worker

NUM_EXPERTS, TOP_K = 6, 2
SCORES = {"sigmoid": torch.sigmoid, "softmax": lambda logits: logits.softmax(-1)}


def routed(router: CPURouter, logits: Tensor) -> Tensor:
    """float32 `[tokens, experts]`, the weight of each expert, 0 if it is not chosen."""
    weights, experts = router._compute_routing(logits, logits, None)
    assert experts.dtype == torch.int32
    return torch.zeros_like(logits).scatter_(1, experts.long(), weights)


@pytest.mark.parametrize("renormalizes", [True, False])
@pytest.mark.parametrize("bias", [None, torch.linspace(1.0, 0.0, NUM_EXPERTS)])
@pytest.mark.parametrize("scoring", SCORES)
def test_experts_are_chosen_by_corrected_scores_and_weighted_by_the_others(
    scoring: str, bias: Tensor | None, *, renormalizes: bool
) -> None:
    assert rl_vllm.engine_worker.EngineWorker
    logits = torch.randn(16, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    router = CPURouter(
        TOP_K,
        NUM_EXPERTS,
        renormalize=renormalizes,
        scoring_func=scoring,
        e_score_correction_bias=bias,
        routed_scaling_factor=1.0 if bias is None else 2.5,
    )
    scores = SCORES[scoring](logits)
    chosen = (scores if bias is None else scores + bias).topk(TOP_K, -1).indices
    expected = torch.zeros_like(scores).scatter_(1, chosen, scores.gather(1, chosen))
    if renormalizes:
        expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(routed(router, logits), expected * (1.0 if bias is None else 2.5))


def test_vllms_router_on_cpu_leaves_out_sigmoids_and_biases() -> None:
    """Once this fails, it need not be completed any longer."""
    compute = CPURouter._compute_routing.__wrapped__
    logits = torch.randn(16, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    with pytest.raises(AssertionError):
        compute(CPURouter(TOP_K, NUM_EXPERTS, scoring_func="sigmoid"), logits, logits, None)
    plain, corrected = (
        compute(CPURouter(TOP_K, NUM_EXPERTS, e_score_correction_bias=bias), logits, logits, None)[1]
        for bias in (None, torch.linspace(9.0, 0.0, NUM_EXPERTS))
    )
    assert torch.equal(plain, corrected)
