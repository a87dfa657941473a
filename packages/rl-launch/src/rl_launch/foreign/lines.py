"""What becomes of each statement of a script."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Fate(IntEnum):
    """What becomes of a statement; the larger one counts."""

    UNRELATED = 0
    CONVERTED = 1
    CHECK = 2
    REFUSED = 3


@dataclass(frozen=True)
class Line:
    """A statement of a script.

    Args:
        number: Its line.
        text: The line.
        fate: What becomes of it.
        reason: The keys it is converted to, or why it is listed, refused or not needed.
        file: Name of the file, if a command starts the script.
    """

    number: int
    text: str
    fate: Fate
    reason: str
    file: str = ""

    @property
    def place(self) -> str:
        """The line in words."""
        return f"{self.file} line {self.number}".strip()
