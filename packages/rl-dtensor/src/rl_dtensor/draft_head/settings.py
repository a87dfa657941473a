"""Settings of a policy that exclude a draft head which trains with it; read without torch."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.config import Problem
from rl_core.model_config import ModelConfig
from rl_dtensor.config import DTensorConfig

KEY = "draft_head.model_name"

SIZES = ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
"""Sizes along which no policy is split whose hidden states a head reads."""


def draft_head_problems(section: ModelConfig, backend: DTensorConfig) -> Iterator[Problem]:
    """Problems of `draft_head` with the other settings of its model."""
    if section.draft_head is None:
        return
    for size in SIZES:
        if (value := getattr(backend, size)) > 1:
            reason = "must be 1 with draft_head, because the head reads whole hidden states"
            yield Problem(f"dtensor_cfg.{size}", reason, got=value, remedy="Set it to 1, or remove draft_head")
    if section.vision.enabled:
        reason = "is not supported with draft_head, because the head does not read images"
        yield Problem("vision.enabled", reason, got=True, remedy="Remove one of the two")
    if section.lora_cfg.enabled:
        reason = "has not been verified with draft_head"
        yield Problem("lora_cfg.enabled", reason, got=True, remedy="Remove one of the two")
