"""Verdicts on the parts of an answer, taken together: true, false, or None if undecided."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """Return whether all hold; None if one is undecided and none fails."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


def matched(mine: list[T], theirs: list[T], compare: Callable[[T, T], bool | None]) -> bool | None:
    """Return whether two collections have the same items in any order, equal ones counted once each."""
    if len(mine) != len(theirs):
        return False
    left, undecided = list(theirs), False
    for item in mine:
        verdicts = [compare(item, other) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True
