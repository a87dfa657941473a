"""Let a draft head keep the layers of its own files.

- Fault: an EAGLE head whose files have an embedding or an output layer equal to the model's at that moment is given the
  model's layer instead. A weight update of either then changes both: that of the head would make the model serve the
  head's weights.
- vLLM 0.32.0, `vllm/v1/spec_decode/llm_base_proposer.py`, `SpecDecodeBaseProposer._maybe_share_embeddings` and
  `_maybe_share_lm_head`, and `vllm/v1/worker/gpu/spec_decode/eagle/utils.py`, `_should_share`.
- Upstream: no upstream issue found on 2026-11-28.
- Delete when `tests/patches/test_layers_of_heads.py::test_vllm_shares_layers_that_are_equal` fails.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

LAYERS = {
    "_maybe_share_embeddings": ("has_own_embed_tokens", "model.embed_tokens"),
    "_maybe_share_lm_head": ("has_own_lm_head", "lm_head"),
}
"""Methods that share a layer; the attribute by which a head says that its files have it, and its name."""

SECOND_RUNNER = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
"""Module of the second model runner, which only GPUs have."""


def keep_layers_of_heads() -> None:
    """Make vLLM share only layers that the files of a head lack."""
    for method, (flag, layer) in LAYERS.items():
        original = vars(SpecDecodeBaseProposer)[method]
        if not hasattr(original, "__wrapped__"):
            setattr(SpecDecodeBaseProposer, method, _unless_own(original, flag, layer))
    if not current_platform.is_cpu():
        vars(importlib.import_module(SECOND_RUNNER))["_should_share"] = _should_share


def _unless_own(share: Callable[..., None], flag: str, layer: str) -> Callable[..., None]:
    @wraps(share)
    def shared(self: Any, target: nn.Module) -> None:
        own = self.model.get_submodule(layer) if getattr(self.model, flag, False) else None
        share(self, target)  # which prepares more than the layer
        if own is not None:
            self.model.set_submodule(layer, own)

    return shared


def _should_share(head: nn.Module, flag: str, own: Any, others: Any) -> bool:
    return not getattr(head, flag, False)
