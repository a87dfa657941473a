"""Counts of speculative decoding, and the metrics that follow from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

_BREAK_EVEN = "break_even_tokens_per_step"
_NUMBERS = ("num_tokens", "num_steps", "num_drafts", "num_draft_tokens")
"""Counts that a report of health has under their own names."""


@dataclass(frozen=True)
class SpeculationCounts:
    """Counts of an engine that decodes speculatively: a drafter proposes tokens, the model accepts the first of them.

    Args:
        num_tokens: Tokens that requests got, accepted ones included.
        num_steps: Steps that gave requests tokens; a step counts once for each of its requests.
        num_drafts: Drafts that the model verified.
        num_draft_tokens: Their tokens.
        num_accepted: Drafts whose first, second, ... token was accepted; as long as the longest draft.
        break_even: Minimum tokens per step for speculation to pay, as the config states it.
    """

    num_tokens: int
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted: tuple[int, ...]
    break_even: float

    @classmethod
    def of_health(cls, health: Mapping[str, Any]) -> SpeculationCounts | None:
        """Return the counts in a report of `Generator.health`; None if it has none."""
        if _BREAK_EVEN not in health:
            return None
        positions = itertools.takewhile(health.__contains__, _positions())
        return cls(
            **{name: health[name] for name in _NUMBERS},
            num_accepted=tuple(health[name] for name in positions),
            break_even=health[_BREAK_EVEN],
        )

    def as_health(self) -> dict[str, float]:
        """Return them as entries of `Generator.health`."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "num_accepted_tokens": sum(self.num_accepted),
            **dict(zip(_positions(), self.num_accepted, strict=False)),
            _BREAK_EVEN: self.break_even,
        }

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        """Return the counts of two engines together."""
        return self._combined(other, 1)

    def since(self, earlier: SpeculationCounts) -> SpeculationCounts:
        """Return what was added since earlier counts; all of it if the engine has been replaced since."""
        return self if self.num_steps < earlier.num_steps else self._combined(earlier, -1)

    def _combined(self, other: SpeculationCounts, sign: int) -> SpeculationCounts:
        return SpeculationCounts(
            **{name: getattr(self, name) + sign * getattr(other, name) for name in _NUMBERS},
            num_accepted=tuple(
                a + sign * b for a, b in zip_longest(self.num_accepted, other.num_accepted, fillvalue=0)
            ),
            break_even=self.break_even,
        )

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a request gets in a step, at least 1; 1 if there were no steps."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def pays(self) -> bool:
        """Return whether requests got enough tokens in a step; true if there were none."""
        return not self.num_steps or self.tokens_per_step >= self.break_even

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of a step by name; none if requests got no tokens."""
        if not self.num_steps:
            return {}
        found = {
            "speculation/tokens_per_step": self.tokens_per_step,
            "speculation/drafts_per_step": self.num_drafts / self.num_steps,
        }
        if not self.num_drafts:
            return found
        by_position = {
            f"speculation/acceptance_rate_{position}": count / self.num_drafts
            for position, count in enumerate(self.num_accepted, start=1)
        }
        return {
            **found,
            "speculation/accepted_tokens": sum(self.num_accepted) / self.num_drafts,
            "speculation/acceptance_rate": sum(self.num_accepted) / self.num_draft_tokens,
            **by_position,
        }


def _positions() -> Iterator[str]:
    """Yield the keys of health for the first, second, ... token of drafts."""
    return (f"num_accepted_at_{position}" for position in itertools.count(1))
