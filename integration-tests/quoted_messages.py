"""Messages of the project that a document quotes: lines such as `` > `no answer within ... s` ``."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from document_checks import ROOT

from rl_core.testing.documents import Document

_QUOTED = re.compile(r"^> (`+)(?P<message>.+)\1$", re.MULTILINE)
_ANYTHING = "..."
_SEPARATOR = "\0"
"""Between strings, and so part of none."""


def quoted_messages(document: Document) -> list[str]:
    """Return the messages that a document quotes, with `...` for the parts that vary."""
    return [found["message"] for found in _QUOTED.finditer(document.text)]


def unknown_messages(document: Document) -> list[str]:
    """Return the quoted messages that no string of the packages' sources contains.

    The parts between `...` must follow one another in one string, which may be an f-string of several lines.
    """
    return [message for message in quoted_messages(document) if not _is_in_sources(message)]


def _is_in_sources(message: str) -> bool:
    parts = [re.escape(part.strip()) for part in message.split(_ANYTHING) if part.strip(" :,")]
    return bool(parts) and re.search(f"[^{_SEPARATOR}]*?".join(parts), _strings()) is not None


@cache
def _strings() -> str:
    """All strings of the sources except docstrings; a value in an f-string is `{}`."""
    found: list[str] = []
    for path in ROOT.glob("packages/*/src/**/*.py"):
        found.extend(_strings_in(ast.parse(path.read_text(encoding="utf-8"))))
    return _SEPARATOR.join(found)


def _strings_in(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in values)
    for child in ast.iter_child_nodes(node):
        yield from _strings_in(child)
