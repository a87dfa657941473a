"""Tokens and sequences that the policy term leaves out."""

from __future__ import annotations

from pydantic import Field

from rl_core.config import Config


class Filters(Config):
    """What the policy term leaves out; it stays in the other terms and in the counts that the loss is divided by."""

    off_policy_threshold: float | None = Field(default=None, gt=0)
    """Exclude sequences with a negative advantage whose mean `generation - logp` is above this (off-policy sequence
    masking, DeepSeek-V3.2, arXiv:2512.02556). If unset, none is excluded."""
    top_entropy_share: float | None = Field(default=None, gt=0, lt=1)
    """Share of the step's sampled tokens to train on: the tokens with the highest policy entropy before the update
    (arXiv:2506.01939 uses 0.2). If unset, all of them train."""
