"""The program in a response."""

from __future__ import annotations

import re
from collections.abc import Iterator

_OPENING = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_PYTHON = ("python", "python3", "py", "py3")


def program_in(response: str) -> str | None:
    """Return the last fenced block of Python, or else the last without a language; None if there is none."""
    blocks = list(fenced_blocks(response))
    named = [body for language, body in blocks if language in _PYTHON]
    unnamed = [body for language, body in blocks if not language]
    chosen = named or unnamed
    return chosen[-1] if chosen and chosen[-1].strip() else None


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language (lower case; empty if none) and the body of every fenced block, as CommonMark defines them.

    A block begins with three or more backticks or tildes and ends with at least as many of the same, or at the end of
    the text. Its lines lose the indentation of its fence. More than CommonMark allows: a fence may be indented by any
    amount, as in lists within lists, and words may follow a closing fence after a space.
    """
    body: list[str] = []
    indent, fence, language = 0, "", ""
    for line in text.splitlines():
        if fence:
            if _closes(line, fence):
                yield language, "".join(body)
                fence, body = "", []
            else:
                body.append(_dedented(line, indent) + "\n")
            continue
        opening = _OPENING.match(line)
        if opening is not None:
            indent, fence = len(opening[1].expandtabs(4)), opening[2]
            language = (opening[3].strip("{} .\t").split() or [""])[0].lower()
    if fence:
        yield language, "".join(body)


def _closes(line: str, fence: str) -> bool:
    plain = line.strip(" \t")
    length = len(plain) - len(plain.lstrip(fence[0]))
    rest = plain[length:]
    return length >= len(fence) and (not rest or (rest[0] in " \t" and "`" not in rest))


def _dedented(line: str, indent: int) -> str:
    """A line without as much of its indentation as the fence has."""
    if not indent:
        return line
    plain = line.lstrip(" \t")
    own = len(line[: len(line) - len(plain)].expandtabs(4))
    return " " * (own - min(own, indent)) + plain
