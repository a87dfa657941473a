"""Weights of tokens by the age of the weights that sampled them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessDecay:
    """Weights the policy term of a token by `decay ** a`, with its age `a = max(0, version - v)` in weight versions.

    v is the weight version that sampled the token, so that tokens of one rollout may differ. The counts that the loss
    is divided by stay as they are: older tokens take smaller steps, as updates by older gradients do in
    staleness-aware SGD (arXiv:1511.05950, which divides by the age).

    Args:
        decay: factor for each version, in (0, 1].
        version: of the weights that the step trains.
    """

    decay: float
    version: int = 0
