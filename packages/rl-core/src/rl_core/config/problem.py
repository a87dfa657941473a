"""What is wrong with a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something wrong with one key, as found by a static check; its origin is added when it is reported.

    Args:
        key: dotted key from the root (in `ProblemError`: from the section that raises it); empty for the whole.
        message: what was got, what is allowed, what to do.
    """

    key: str
    message: str


class ProblemError(ValueError):
    """Raised in a section's validator to blame keys of that section rather than the section as a whole.

    Args:
        problems: with keys relative to the section.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(f"{problem.key}: {problem.message}" for problem in self.problems)
