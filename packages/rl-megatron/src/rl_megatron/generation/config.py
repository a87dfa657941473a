"""Settings of the Megatron generator, `policy.generation.megatron_cfg`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rl_core.config import Config, WhenChanged


class MegatronGenerationConfig(Config):
    """Generation with Megatron Core."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    tensor_model_parallel_size: int = Field(default=1, gt=0)
    """Number of ranks that share the matrices of each layer; a replica has one."""
    max_batch_size: int = Field(default=64, gt=0)
    """Maximum number of completions decoded together, from first to last. Further requests wait until all of them have
    ended."""
    max_prefill_tokens: int = Field(default=16384, gt=0)
    """Maximum number of tokens in one forward pass over prompts. A single longer prompt is an exception."""
