"""Where a value of the config was written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a value was written.

    Args:
        source: a file as the user would type it, `command line`, `default`, or the name of a mapping made in code.
        line: line in the file, from 1.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Origin("command line")
DEFAULT = Origin("default")
