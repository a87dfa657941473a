"""Settings of the Megatron generator, `policy.generation.megatron_cfg`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_core.config import Config, WhenChanged


class MegatronGenerationConfig(Config):
    """Generation with Megatron Core."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """Ranks that share each layer's matrices; a replica has one."""
    max_batch_size: int = Field(default=64, gt=0)
    """Most completions decoded together, from first to last: further requests wait until all of them have ended."""
    max_prefill_tokens: int = Field(default=16384, gt=0)
    """Most tokens of one forward pass over prompts; a single longer prompt excepted."""
