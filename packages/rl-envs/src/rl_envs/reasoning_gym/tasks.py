"""The tasks of reasoning-gym with their settings, read from its source: importing it takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from rl_core.plugins import DatasetTask

_OF_THE_DATASET = ("seed", "size")
"""Settings that every task has, and that the dataset sets."""


def tasks() -> list[DatasetTask]:
    """Every task by name; none if reasoning-gym is not installed."""
    spec = find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        return []
    found = [task for path in Path(spec.origin).parent.rglob("*.py") for task in tasks_in(path.read_text("utf-8"))]
    return sorted(found, key=lambda task: task.name)


def tasks_in(source: str) -> Iterator[DatasetTask]:
    """The tasks that a module registers with `register_dataset(name, dataset class, config class, ...)`."""
    if "register_dataset(" not in source:
        return
    module = ast.parse(source)
    classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
    texts = {
        target.id: each.value.value
        for each in module.body
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    for call in (each.value for each in module.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)):
        match call.func, call.args:
            case ast.Name(id="register_dataset"), [name, ast.Name(id=dataset), ast.Name(id=config), *_]:
                doc = ast.get_docstring(classes[dataset]) if dataset in classes else None
                settings = dict(_fields(classes[config])) if config in classes else {}
                yield DatasetTask(_text(name, texts), (doc or "").strip().partition("\n")[0], settings)


def _text(name: ast.expr, texts: Mapping[str, str]) -> str:
    if isinstance(name, ast.Name):
        return texts[name.id]
    assert isinstance(name, ast.Constant)
    return str(name.value)


def _fields(config: ast.ClassDef) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names of a dataclass's fields, each with its type and default as text."""
    for each in config.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value) if name not in _OF_THE_DATASET:
                yield name, (ast.unparse(kind), _default(value))


def _default(value: ast.expr | None) -> str:
    match value:
        case None:
            return ""
        case ast.Call(func=ast.Name(id="field"), keywords=keywords):
            given = {keyword.arg: keyword.value for keyword in keywords}
            factory = given.get("default_factory")
            if isinstance(factory, ast.Lambda):
                return ast.unparse(factory.body)
            return ast.unparse(given["default"]) if "default" in given else ""
        case _:
            return ast.unparse(value)
