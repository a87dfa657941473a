"""A page of the errors with the messages that the packages raise them with, read from the sources."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import rl_core.errors
from rl_core.errors import RLError
from website.reference.text import code, prose

PLACE = "reference/errors.md"
_OPENING = """# Errors

All errors that the packages raise intentionally are in `rl_core` and derive from `RLError`. A message states what was
given, what is allowed and what to do; `…` stands for the names and values of your case. Search this page for the words
of a message. [Debugging](../debugging.md) starts from symptoms.

"""
_ANY = "…"


def pages(root: Path) -> dict[str, str]:
    """Return the text of the page by its place.

    Args:
        root: Folder of the checkout.
    """
    found = messages(root)
    return {PLACE: _OPENING + "\n".join(_section(each, found.get(each.__name__, [])) for each in classes())}


def classes() -> list[type[Exception]]:
    """Return the classes of errors, in the order of their module."""
    kinds = [each for _, each in inspect.getmembers(rl_core.errors, inspect.isclass)]
    own = [each for each in kinds if issubclass(each, RLError) and each.__module__ == rl_core.errors.__name__]
    return sorted(own, key=lambda each: inspect.getsourcelines(each)[1])


def messages(root: Path) -> dict[str, list[str]]:
    """Return the messages by the name of the class that they are raised with, sorted.

    Messages that are made elsewhere than in the `raise` are not known.

    Args:
        root: Folder of the checkout.
    """
    names = {each.__name__ for each in classes()}
    found: dict[str, set[str]] = {}
    raised = re.compile(rf"raise (?:{'|'.join(names)})\(")
    for path in root.glob("packages/*/src/**/*.py"):
        source = path.read_text(encoding="utf-8")
        # only some of the files raise an error, and to parse all takes seconds
        for node in ast.walk(ast.parse(source)) if raised.search(source) else ():
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[message, *_])) if name in names:
                    found.setdefault(name, set()).update(_text(message))
    return {name: sorted(texts) for name, texts in found.items()}


def _text(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield " ".join(text.split())
        case ast.JoinedStr(values=parts):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else _ANY for part in parts)
            # a message that is all values has no words to search for
            if any(character.isalpha() for character in text):
                yield " ".join(text.split())


def _section(kind: type[Exception], found: list[str]) -> str:
    heading = f"## {code(kind.__name__)} {{ #{kind.__name__} }}\n\n{prose(_first_paragraph(kind))}\n"
    return heading + ("\n" + "".join(f"- {prose(message)}\n" for message in found) if found else "")


def _first_paragraph(kind: type[Exception]) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
