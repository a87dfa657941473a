"""Fenced blocks of Markdown in a response."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE_END = re.compile(r"\r\n?|\n")
_OPENING = re.compile(
    r"(?P<before>(?:[ \t]*+(?:>|(?:[-*+]|\d{1,9}[.)])(?=[ \t])))*[ \t]*+)"
    r"(?P<fence>`{3,}+(?=[^`]*+\Z)|~{3,}+)(?P<info>.*+)",
    re.DOTALL,
)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
_QUOTE = re.compile(r" {0,3}> ?")


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language (lower case; empty if none) and the body of every fenced block, as CommonMark defines them.

    A block begins with three or more backticks or tildes, perhaps after the mark of a list or a quotation, and ends
    with at least as many of the same, or at the end of the text. Its lines lose the indentation of its fence. More
    than CommonMark allows: a fence may be indented by any amount, and words may follow a closing fence after a space.
    """
    body: list[str] = []
    indent, num_quotes, fence, language = 0, 0, "", ""
    for line in _LINE_END.split(text):
        if not fence:
            if (opening := _OPENING.match(line)) is not None:
                fence = opening["fence"]
                num_quotes = opening["before"].count(">")
                indent = len(_unquoted(opening["before"], num_quotes).expandtabs(4))
                info = opening["info"]
                found = _LANGUAGE.match(info)
                language = "" if found is None else found[1].lower()
            continue
        content = _unquoted(line, num_quotes)
        if _closes(content, fence, indent):
            yield language, "".join(body)
            fence, body = "", []
        else:
            body.append(_dedented(content, indent) + "\n")
    if fence:
        yield language, "".join(body).rstrip("\n") + "\n"


def _unquoted(line: str, num_quotes: int) -> str:
    """Return a line without up to this number of marks of quotations."""
    position = 0
    for _ in range(num_quotes):
        if (mark := _QUOTE.match(line, position)) is None:
            break
        position = mark.end()
    return line[position:]


def _closes(line: str, fence: str, indent: int) -> bool:
    plain = line.lstrip(" \t")
    if len(line[: len(line) - len(plain)].expandtabs(4)) > indent + 3:
        return False  # such as an example in a docstring
    rest = plain.lstrip(fence[0])
    return len(plain) - len(rest) >= len(fence) and (not rest or (rest[0] in " \t" and "`" not in rest))


def _dedented(line: str, indent: int) -> str:
    """Return a line without as much of its indentation as the fence has."""
    if not indent:
        return line
    plain = line.lstrip(" \t")
    own = len(line[: len(line) - len(plain)].expandtabs(4))
    return " " * (own - min(own, indent)) + plain
