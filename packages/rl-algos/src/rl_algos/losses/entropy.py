"""A bonus for the policy's entropy."""

from __future__ import annotations

from pydantic import Field

from rl_core.config import Config


class EntropyBonus(Config):
    """A term of the loss that increases the mean entropy of the next token's distribution."""

    weight: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy of the next token's distribution, which the loss increases; with `target`, the initial
    weight."""
    target: float | None = Field(default=None, gt=0)
    """Target entropy, below which the bonus applies. Its weight increases by `weight_step` at each step below the
    target and decreases above it (Skywork-OR1, arXiv:2505.22312). If unset, the weight is fixed."""
    weight_step: float = Field(default=0.005, gt=0)
    """Change of an adaptive weight per step."""

    @property
    def is_on(self) -> bool:
        """True if the loss has the term."""
        return self.weight > 0 or self.target is not None
