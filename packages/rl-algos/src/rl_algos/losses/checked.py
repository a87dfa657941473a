"""Sections of a loss whose settings must fit one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

from rl_core.config import Config, Problem, ProblemError


class CheckedConfig(Config):
    """A section that reports all its `_problems` together."""

    def _problems(self) -> Iterator[Problem]:
        """Yield settings that contradict one another."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self._problems()):
            raise ProblemError(*problems)
        return self
