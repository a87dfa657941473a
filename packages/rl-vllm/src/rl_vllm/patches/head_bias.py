"""The bias of a head of a model that vLLM runs with the code of transformers."""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.transformers.causal import CausalMixin

from rl_core.weights import Manifest

BIAS = "lm_head.bias"
"""End of the name by which such a model of vLLM knows the bias of its head."""


def keep_head_bias(model: nn.Module, manifest: Manifest) -> None:
    """Give the head of a model (Phi) the bias that a manifest has for it, and keep it in later loads.

    vLLM's code of such models (0.32; models/transformers/causal.py) makes the bias when it meets one in the weights,
    and another one in every load: a reload then fills one that it drops. To be removed once a bias that is there stays.
    """
    if not isinstance(model, CausalMixin) or not isinstance(model.lm_head, ParallelLMHead):
        return
    head = model.lm_head
    if head.bias is None and any(spec.name.endswith(BIAS) for spec in manifest.tensors):
        head._register_bias()
    if head.bias is not None:
        vars(head)["_register_bias"] = _keep


def _keep() -> None:
    """Make no other bias."""
