"""Markdown of generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`+)(?:.+?)\1", re.DOTALL)
_SPECIAL = re.compile(r"([<\[\]*_\\])")


def prose(text: str) -> str:
    """Return a docstring or a help text as Markdown: inline code stays, and nothing else in it is markup."""
    parts, last = list[str](), 0
    for found in _CODE.finditer(text):
        parts += (_SPECIAL.sub(r"\\\1", text[last : found.start()]), found[0])
        last = found.end()
    return "".join((*parts, _SPECIAL.sub(r"\\\1", text[last:])))


def code(text: str) -> str:
    """Return inline code, also of text that has backticks."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown, whose line breaks become spaces."""
    lines = [_row(head), _row("---" for _ in head), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def block(language: str, text: str) -> str:
    """Return fenced code."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
