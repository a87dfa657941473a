"""The bias of a head of a model that vLLM runs with the code of transformers.

- Fault: vLLM makes the parameter of the bias when it meets one in the weights, and another one in every load. A reload
  then fills a parameter that it drops.
- vLLM 0.32.0, `vllm/model_executor/models/transformers/causal.py`.
- Upstream: no upstream issue found on 2026-11-26. https://github.com/vllm-project/vllm/pull/46835 (merged) made vLLM
  apply such a bias.
- Delete when `tests/patches/test_head_bias.py::test_vllm_makes_another_bias_in_every_load` fails.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.transformers.causal import CausalMixin

from rl_core.weights import Manifest

BIAS = "lm_head.bias"
"""End of the name of the head's bias in such a model of vLLM."""


def keep_head_bias(model: nn.Module, manifest: Manifest) -> None:
    """Give the head of a model (Phi) the bias that a manifest has for it, and keep it in later loads."""
    if not isinstance(model, CausalMixin) or not isinstance(model.lm_head, ParallelLMHead):
        return
    head = model.lm_head
    if head.bias is None and any(spec.name.endswith(BIAS) for spec in manifest.tensors):
        head._register_bias()
    if head.bias is not None:
        vars(head)["_register_bias"] = lambda: None  # It makes no other bias.
