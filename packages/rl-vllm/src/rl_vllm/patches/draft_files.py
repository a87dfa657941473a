"""Drafters and their own files. vLLM 0.32.0 has two faults in loading them.

Draft models are not loaded by their own config:

- Fault: the loaders of draft models drop `draft_load_config`, and load the drafter as the model that it drafts for. In
  an engine that waits for weights, whose `load_format` is `dummy`, the drafter is random: everything is right and no
  draft is accepted.
- vLLM 0.32.0, `vllm/v1/spec_decode/draft_model.py`, `DraftModelProposer._get_model`, and
  `vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py`, `load_draft_model`.
- Upstream: https://github.com/vllm-project/vllm/pull/55337 (open) corrects a third loader.
- Delete when `tests/patches/test_draft_files.py::test_vllms_loader_of_draft_models_drops_their_load_config` fails.

Draft heads lose the layers of their files:

- Fault: an EAGLE head whose files have an embedding or an output layer equal to the model's at that moment is given the
  model's layer instead. A weight update of either then changes both: an update of the head would make the model serve
  the head's weights.
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
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.platforms import current_platform
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

LAYERS = {
    "_maybe_share_embeddings": ("has_own_embed_tokens", "model.embed_tokens"),
    "_maybe_share_lm_head": ("has_own_lm_head", "lm_head"),
}
"""Methods that share a layer, to the attribute that marks a head whose files have it, and to the layer's name."""

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
        share(self, target)  # This prepares more than the layer, so it is called in any case.
        if own is not None:
            self.model.set_submodule(layer, own)

    return shared


def _should_share(head: nn.Module, flag: str, own: Any, others: Any) -> bool:
    return not getattr(head, flag, False)


LOADERS = ("vllm.v1.spec_decode.draft_model", "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator")
"""Modules of the loaders of the first model runner, and of the second, which only GPUs have."""


def load_drafters_as_configured() -> None:
    """Make vLLM's loaders of draft models read their own load config."""
    for name in LOADERS[:1] if current_platform.is_cpu() else LOADERS:
        vars(importlib.import_module(name))["get_model"] = get_drafter


def get_drafter(*, vllm_config: VllmConfig, **given: Any) -> nn.Module:
    """Load a draft model.

    Args:
        vllm_config: Config that has the drafter as its model.
        given: Further arguments of `get_model`.
    """
    return get_model(vllm_config=vllm_config, load_config=get_draft_load_config(vllm_config), **given)
