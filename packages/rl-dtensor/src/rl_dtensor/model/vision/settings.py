"""Checks of vision-language models that need no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_core.config import Problem
from rl_core.model_config import VisionConfig
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel.sizes import SECTION

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "idefics3", "smolvlm", "internvl")
"""Model types that train with images."""

ONLY_WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl")
"""Those of them of whose text alone transformers has no causal language model."""

SIZED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Those of them whose image processors scale images to a number of pixels."""

BOTH_WAYS = ("gemma3",)
"""Those of them in which the tokens of an image see one another."""

_FLASH = ("flash_attention_2", "flash_attention_3")


def vision_problems(vision: VisionConfig, backend: DTensorConfig, fields: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings that do not go with a vision-language model.

    Args:
        vision: Settings of images.
        backend: Settings of the backend.
        fields: Fields of the whole Hugging Face config; empty if it is not available.
    """
    if not vision.enabled and fields.get("model_type") in ONLY_WITH_IMAGES:
        reason = f"must be true for {fields['model_type']} models, which cannot be trained as language models"
        yield Problem("vision.enabled", reason, got=False, remedy="Set it to true; rows need no images")
    if not vision.enabled:
        return
    if backend.pipeline_parallel_size > 1:
        yield Problem(
            f"{SECTION}.pipeline_parallel_size",
            "must be 1 with vision.enabled=true: a vision tower cannot be cut into stages",
            got=backend.pipeline_parallel_size,
            remedy="Set it to 1, and tensor_parallel_size or context_parallel_size instead",
        )
    kind = fields.get("model_type")
    if kind is None:
        return
    if kind not in FAMILIES:
        yield Problem(
            "vision.enabled",
            f"is not supported for {kind} models",
            allowed=f"false, or a model of one of the families {', '.join(FAMILIES)}",
        )
        return
    for name in ("min_pixels", "max_pixels"):
        if getattr(vision, name) is not None and kind not in SIZED:
            yield Problem(
                f"vision.{name}",
                f"has no effect on {kind} models, whose images have fixed sizes",
                remedy="Remove this key",
            )
    if kind in BOTH_WAYS and backend.attention_backend in _FLASH:
        yield Problem(
            f"{SECTION}.attention_backend",
            f"cannot let the tokens of an image see one another, as {kind} models do",
            got=backend.attention_backend,
            allowed="auto, sdpa, eager, flex",
        )
