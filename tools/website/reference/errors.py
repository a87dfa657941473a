"""A page of the errors with the messages that the packages raise them with, read from the sources."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
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
_KEYS = """## Problems of config keys { #problems }

A config is checked as a whole before anything starts, and a `ConfigError` lists every problem with the key, the place
where it was set, and the remedy. Keys are shown here relative to their section.

"""
_ANY = "…"
_Variables = Mapping[str, list[ast.expr]]
"""Values that a function assigns to each name."""


def pages(root: Path) -> dict[str, str]:
    """Return the text of the page by its place.

    Args:
        root: Folder of the checkout.
    """
    found = messages(root)
    texts = (_section(each, found.get(each.__name__, [])) for each in classes())
    keys = _KEYS + "".join(f"- {problem}\n" for problem in problems(root))
    return {PLACE: _OPENING + "\n".join((*texts, keys))}


def classes() -> list[type[Exception]]:
    """Return the classes of errors, in the order of their module."""
    kinds = [each for _, each in inspect.getmembers(rl_core.errors, inspect.isclass)]
    own = [each for each in kinds if issubclass(each, RLError) and each.__module__ == rl_core.errors.__name__]
    return sorted(own, key=lambda each: inspect.getsourcelines(each)[1])


def messages(root: Path) -> dict[str, list[str]]:
    """Return the messages by the name of the class that they are raised with, sorted.

    A message may be made in the `raise`, or in variables of the same function. Those of `Problem` are in `problems`.

    Args:
        root: Folder of the checkout.
    """
    names = {each.__name__ for each in classes()}
    found: dict[str, set[str]] = {}
    for call, variables in _calls(root, rf"raise (?:{'|'.join(names)})\("):
        match call:
            case ast.Call(func=ast.Name(id=name), args=[message, *_]) if name in names:
                found.setdefault(name, set()).update(filter(_has_words, _texts(message, variables)))
    return {name: sorted(texts) for name, texts in found.items()}


def problems(root: Path) -> list[str]:
    """Return what can be wrong with single keys of a config, each as `key: reason. Remedy`, sorted.

    A key is relative to the section that has it, and `…` if it is not written out.

    Args:
        root: Folder of the checkout.
    """
    found = set[str]()
    for call, variables in _calls(root, r"\bProblem(?:\.unused)?\("):
        given = {each.arg: each.value for each in call.keywords}
        match call.func, call.args:
            case ast.Name(id="Problem"), [key, *rest]:
                reasons = _texts(rest[0], variables) if rest else [""]
                remedies = _texts(given["remedy"], variables) if "remedy" in given else [""]
                allowed = (
                    [f"allowed: {text}" for text in _texts(given["allowed"], variables)] if "allowed" in given else []
                )
            case ast.Attribute(value=ast.Name(id="Problem"), attr="unused"), [key, condition]:
                reasons = [f"has no effect {text}" for text in _texts(condition, variables)]
                remedies = _texts(given["remedy"], variables) if "remedy" in given else ["Remove this key"]
                allowed = []
            case _:
                continue
        for name, reason, remedy in product(_texts(key, variables), reasons, remedies):
            text = ". ".join(filter(_has_words, ("; ".join(filter(_has_words, (reason, *allowed))), remedy)))
            if text:
                found.add(f"{code(name)}: {prose(text)}" if _has_words(name) else prose(text))
    return sorted(found)


def _calls(root: Path, pattern: str) -> Iterator[tuple[ast.Call, _Variables]]:
    """Yield every call in the files in which a pattern is found, with the variables of the function around it."""
    sought = re.compile(pattern)
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        # only some of the files raise an error, and to parse all takes seconds
        if sought.search(path.read_text(encoding="utf-8")):
            yield from _parsed(path)


@cache
def _parsed(path: Path) -> list[tuple[ast.Call, _Variables]]:
    found = list[tuple[ast.Call, _Variables]]()

    def visit(node: ast.AST, variables: _Variables) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            variables = {**variables, **_assigned(node)}
        if isinstance(node, ast.Call):
            found.append((node, variables))
        for each in ast.iter_child_nodes(node):
            visit(each, variables)

    tree = ast.parse(path.read_text(encoding="utf-8"))
    visit(tree, _assigned(tree, is_module=True))
    return found


def _assigned(scope: ast.AST, is_module: bool = False) -> _Variables:
    """Return the values that are assigned to the names of a function, or at the top of a module."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.iter_child_nodes(scope) if is_module else ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).append(value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for each, value in zip(names, values, strict=True):
                    if isinstance(each, ast.Name):
                        found.setdefault(each.id, []).append(value)
    return found


def _texts(node: ast.expr, variables: _Variables, depth: int = 4) -> list[str]:
    """Return the possible texts of an expression, with `…` for values."""
    match node:
        case ast.Constant(value=str(text)):
            found = [text]
        case ast.JoinedStr(values=parts):
            found = ["".join(str(each.value) if isinstance(each, ast.Constant) else _ANY for each in parts)]
        case ast.IfExp(body=one, orelse=other):
            found = [*_texts(one, variables, depth), *_texts(other, variables, depth)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            pairs = product(_texts(left, variables, depth), _texts(right, variables, depth))
            found = [one + other for one, other in pairs]
        case ast.Name(id=name) if name in variables and depth:
            found = [text for value in variables[name] for text in _texts(value, variables, depth - 1)]
        case _:
            found = [_ANY]
    return [" ".join(text.split()) for text in found]


def _has_words(text: str) -> bool:
    return any(character.isalpha() for character in text)


def _section(kind: type[Exception], found: list[str]) -> str:
    heading = f"## {code(kind.__name__)} {{ #{kind.__name__} }}\n\n{prose(_first_paragraph(kind))}\n"
    return heading + ("\n" + "".join(f"- {prose(message)}\n" for message in found) if found else "")


def _first_paragraph(kind: type[Exception]) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
