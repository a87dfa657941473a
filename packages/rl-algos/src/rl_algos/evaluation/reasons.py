"""Reasons of failures, counted by their cause."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

MOST_REASONS = 5
"""Reasons listed in a message, the commonest first."""

_REASON_LENGTH = 160
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


def reason_counts(failures: Sequence[str]) -> dict[str, int]:
    """The number of failures by their cause, the commonest first, each named by the reason of its first failure."""
    counts = Counter(map(cause_of, failures))
    examples = {cause_of(failure): _reason(failure) for failure in reversed(failures)}
    return {examples[cause]: count for cause, count in counts.most_common()}


def listed(counts: Mapping[str, int]) -> str:
    """Reasons with their numbers, as messages have them."""
    shown = "; ".join(f"{count} x {reason}" for reason, count in islice(counts.items(), MOST_REASONS))
    others = f"; and {len(counts) - MOST_REASONS} other reasons" if len(counts) > MOST_REASONS else ""
    return f"{shown}{others}"


def cause_of(failure: str) -> str:
    """The reason without the values in it: failures that differ only in these have one cause."""
    return _VARIES.sub("", _reason(failure))


def _reason(failure: str) -> str:
    return failure.splitlines()[0][:_REASON_LENGTH] if failure else ""
