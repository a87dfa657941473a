"""Draft models, loaded as they are meant to be.

- Fault: the loaders of draft models drop `draft_load_config`, and load the drafter as the model that it drafts for. In
  an engine that waits for weights, whose `load_format` is `dummy`, the drafter is random: everything is right and no
  draft is accepted.
- vLLM 0.32.0, `vllm/v1/spec_decode/draft_model.py`, `DraftModelProposer._get_model`, and
  `vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py`, `load_draft_model`.
- Upstream: https://github.com/vllm-project/vllm/pull/55337 (open) corrects a third loader.
- Delete when `tests/patches/test_draft_files.py::test_vllms_loader_of_draft_models_drops_their_load_config` fails.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.platforms import current_platform

LOADERS = ("vllm.v1.spec_decode.draft_model", "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator")
"""Modules of the loaders: of the first model runner, and of the second, which only GPUs have."""


def load_drafters_as_configured() -> None:
    """Make vLLM's loaders of draft models read their own load config."""
    for name in LOADERS[:1] if current_platform.is_cpu() else LOADERS:
        vars(importlib.import_module(name))["get_model"] = get_drafter


def get_drafter(*, vllm_config: VllmConfig, **given: Any) -> nn.Module:
    """Load a draft model.

    Args:
        vllm_config: Config with that of the drafter in the place of its model.
        given: Further arguments of `get_model`.
    """
    return get_model(vllm_config=vllm_config, load_config=get_draft_load_config(vllm_config), **given)
