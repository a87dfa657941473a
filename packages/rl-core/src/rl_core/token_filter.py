"""Limits of sampling to likely tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenFilter:
    """Tokens that sampling may draw, of a distribution whose logits the temperature has divided.

    Three conditions, one after the other, as vLLM applies them; the remaining tokens are normalised again:

    1. `min_p`: at least this share of the probability of the most likely token.
    2. `top_k`: one of the k most likely.
    3. `top_p`: one of the fewest most likely tokens that hold this share of the mass after the first two. The most
       likely token always stays.

    Args:
        top_k: 0 keeps all.
        top_p: In (0, 1]; 1 keeps all.
        min_p: In [0, 1]; 0 keeps all.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def keeps_all(self) -> bool:
        """Return whether nothing is filtered out."""
        return not self.top_k and self.top_p == 1.0 and self.min_p == 0.0
