"""Key paths: `grpo.seed`, `data.train[0].split`."""

from __future__ import annotations

import re
from collections.abc import Iterable

KeyPath = tuple[str | int, ...]

_PART = re.compile(r"([^.\[\]]+)((?:\[\d+\])*)")


def parse_path(key: str) -> KeyPath:
    """The segments of a dotted key; `[n]` addresses an entry of a list.

    Raises:
        ValueError: where a segment is empty or malformed.
    """
    path: list[str | int] = []
    for part in key.split("."):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{key!r} is not a key: write names joined by dots, list entries as [0]")
        path.append(match[1])
        path.extend(int(index) for index in re.findall(r"\d+", match[2]))
    return tuple(path)


def format_path(path: Iterable[str | int]) -> str:
    """The dotted key of a path; inverse of `parse_path`."""
    text = ""
    for segment in path:
        text += f"[{segment}]" if isinstance(segment, int) else f".{segment}"
    return text.removeprefix(".")
