"""Settings of the Hugging Face generator."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rl_core.config import Config, WhenChanged


class HFConfig(Config):
    """Generation with Hugging Face transformers."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    max_batch_size: int = Field(default=64, gt=0)
    """Maximum number of completions decoded together; further requests wait for a free row."""
    max_prefill_tokens: int = Field(default=16384, gt=0)
    """Maximum number of tokens, padding included, in one forward pass over prompts. A single longer prompt is an
    exception."""
    attn_implementation: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of the model. `auto` uses `sdpa`, and `eager` for models that `sdpa` does not compute:
    with a soft cap of scores, or with sinks."""
