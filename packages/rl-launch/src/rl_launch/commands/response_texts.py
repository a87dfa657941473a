"""Text that a file of the user's looks for in responses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

_MOST = 8
"""Maximum number of places that are listed."""
_OF_RE = frozenset({"compile", "finditer", "findall", "fullmatch", "match", "search", "split", "sub"})
_OF_TEXT = frozenset(
    {"endswith", "find", "index", "partition", "removeprefix", "removesuffix", "rpartition", "split", "startswith"}
)


@dataclass(frozen=True)
class SoughtText:
    """A text that code looks for.

    Args:
        place: File and line.
        text: A regular expression or a constant.
        how: What takes it, such as `re.search` or `==`.
    """

    place: str
    text: str
    how: str

    def __str__(self) -> str:
        return f"{self.place}: {self.how} {' '.join(self.text.splitlines())}"


def sought_texts(name: str) -> list[SoughtText]:
    """Return the regular expressions and constant strings that an environment's code compares with something, in the
    order of the file; empty for one that is not in a file, or whose file cannot be read. Its code is its definition and
    those of the file that this refers to.

    Args:
        name: `file.py:NAME`.
    """
    file, colon, attribute = name.rpartition(":")
    path = Path(file).expanduser()
    if not colon or path.suffix != ".py":
        return []
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    texts = [each for statement in _used_by(tree, attribute) for each in _found(statement)]
    found = [SoughtText(f"{path.name}:{line}", text, how) for line, text, how in sorted(texts, key=itemgetter(0))]
    return found[:_MOST]


def _used_by(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the statements of a module that define a name, and the names that these refer to."""
    defined: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for each in _names_defined(statement):
            defined.setdefault(each, []).append(statement)
    used: list[ast.stmt] = []
    waiting = list(defined.get(name, tree.body))
    while waiting:
        statement = waiting.pop()
        if statement in used:
            continue
        used.append(statement)
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        waiting += [other for each in names for other in defined.get(each, ())]
    return used


def _names_defined(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign() | ast.AnnAssign():
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


def _found(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=attribute), args=[first, *_]):
                known, how = _OF_RE, f"re.{attribute}"
            case ast.Call(func=ast.Attribute(attr=attribute), args=[first, *_]):
                known, how = _OF_TEXT, f".{attribute}"
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for operator, each in zip(ops, comparators, strict=True):
                    sign = _sign(operator)
                    for text in (*_texts(left), *_texts(each)) if sign else ():
                        yield node.lineno, text, sign
                continue
            case _:
                continue
        if attribute in known:
            for text in _texts(first):
                yield node.lineno, text, how


def _sign(operator: ast.cmpop) -> str:
    return {ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in"}.get(type(operator), "")


def _texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if text:
            yield text
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _texts(left)
            yield from _texts(right)
        case ast.JoinedStr(values=items):
            for item in items:
                yield from _texts(item)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            for item in items:
                yield from _texts(item)
