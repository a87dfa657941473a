"""Patterns of the names of parameters, for processes with and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol


class TrainedPatterns(Protocol):
    """The keys of a model that choose what trains."""

    @property
    def freeze(self) -> Sequence[str]:
        """Patterns of parameters that do not train."""

    @property
    def train_only(self) -> Sequence[str]:
        """Patterns of the only parameters that train; empty for all."""


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of `policy.freeze` matches a parameter, or a module that it is part of."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def trained_names(model: TrainedPatterns, names: Sequence[str]) -> list[str]:
    """Return the parameters that train by `freeze` and `train_only`.

    Args:
        model: Settings of the model.
        names: Names of all parameters of the whole model.
    """
    found = [name for name in names if any(matches(name, each) for each in model.train_only or ["*"])]
    return [name for name in found if not any(matches(name, each) for each in model.freeze)]


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that match no parameter."""
    return [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]
