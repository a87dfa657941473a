"""Patterns of the names of parameters, for processes with and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

from rl_core.config import did_you_mean


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


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no parameter.

    Args:
        key: Key of the patterns.
        patterns: The patterns.
        names: Names of the parameters that they may match, in the whole model.

    Raises:
        ValueError: If a pattern matches none, with names that are like it.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ValueError(
                f"{key}: {pattern!r} matches no parameter{did_you_mean(pattern, names)}. Patterns match whole names of "
                f"parameters or modules, such as {names[0]}; write *.NAME for a part of a name"
            )


def frozen_names(config: TrainedPatterns, names: Sequence[str]) -> set[str]:
    """Return the parameters that `freeze` and `train_only` keep from training.

    Args:
        config: Settings of the model.
        names: Names of all parameters of the whole model.

    Raises:
        ValueError: If a pattern matches no parameter, or nothing is left to train.
    """
    check_patterns("freeze", config.freeze, names)
    check_patterns("train_only", config.train_only, names)
    trained = [name for name in names if any(matches(name, each) for each in config.train_only or ["*"])]
    trained = [name for name in trained if not any(matches(name, each) for each in config.freeze)]
    if not trained:
        raise ValueError("freeze: no parameter is left to train; remove a pattern here, or extend train_only")
    return set(names) - set(trained)
