"""Short headings for keys."""

from __future__ import annotations

from collections.abc import Sequence


def headings(keys: Sequence[str]) -> list[str]:
    """Return the last names of each key that tell it from the others: `lr` of `policy.optimizer.kwargs.lr`. Metrics
    stay whole.
    """
    return [_shortest(key, [other for other in keys if other != key]) for key in keys]


def _shortest(key: str, others: Sequence[str]) -> str:
    if "/" in key:
        return key
    names = key.split(".")
    for count in range(1, len(names)):
        short = names[-count:]
        if all(other.split(".")[-count:] != short for other in others):
            return ".".join(short)
    return key
