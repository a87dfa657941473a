"""Weights of tokens by the age of the weights that sampled them."""

from __future__ import annotations

from pydantic import Field

from rl_core.config import Config


class StalenessDecay(Config):
    """Weights the policy term of a token by `decay ** a`, with its age `a = max(0, version - v)` in weight versions.

    `version` is the version of the weights that the step trains, and v the version that sampled the token, so tokens of
    one rollout may differ. The counts that the loss is divided by stay as they are: older tokens take smaller steps, as
    updates by older gradients do in staleness-aware SGD (arXiv:1511.05950, which divides by the age).
    """

    decay: float = Field(gt=0, lt=1)
    """Factor of a token's policy term per weight version between the weights that sampled it and the weights that
    train, in addition to the importance weight."""
