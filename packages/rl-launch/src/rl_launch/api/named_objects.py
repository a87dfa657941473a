"""Functions and classes in a config that was made in Python, written as in YAML."""

from __future__ import annotations

import ast
import inspect
import site
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from rl_core.config.tree import format_path
from rl_core.errors import ConfigError
from rl_core.exports import public_home
from rl_core.run import Callback

_DOTTED = ("optimizer", "scheduler")
"""Sections whose classes have dotted names without a colon, such as torch's."""


def with_names(config: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Replace every function and class in nested plain values by its name, every path by its text, and a callback that
    is a dataclass by its class and settings.

    A function or class of an installed package is named `package.module:Name`, one in a file `file.py:Name`: workers
    get that file, and run it.

    Raises:
        ConfigError: If a worker could not find one by its name, or a value cannot be part of a config.
    """
    match config:
        case Mapping():
            return {str(key): with_names(value, (*path, str(key))) for key, value in config.items()}
        case list() | tuple():
            return [with_names(value, (*path, index)) for index, value in enumerate(config)]
        case Path():
            return str(config)
        case Callback() if is_dataclass(config):
            settings = {each.name: getattr(config, each.name) for each in fields(config) if each.init}
            kind = _name(type(config), format_path(path), is_dotted=False)
            return {"type": kind, "settings": with_names(settings, path)}
        case Callback():
            raise ConfigError(
                f"{format_path(path)}: got an instance of {type(config).__name__}, whose settings cannot be read; give "
                'the class, or {"type": the class, "settings": {...}}, or make the class a dataclass'
            )
        case _ if inspect.isclass(config) or inspect.isroutine(config):
            return _name(config, format_path(path), is_dotted=bool(set(_DOTTED) & set(path)))
        case None | bool() | int() | float() | str():
            return config
        case _:
            raise ConfigError(
                f"{format_path(path) or 'config'}: a {type(config).__name__} cannot be a value of a config; give "
                "numbers, strings, lists and mappings, functions and classes, or, in data.train and data.validation, "
                "rows"
            )


def _name(target: Any, key: str, *, is_dotted: bool) -> str:
    name = target.__qualname__
    if "<" in name:
        what = "a lambda" if "<lambda>" in name else "defined inside a function"
        raise ConfigError(f"{key}: {name} is {what}, so workers cannot import it; define it at the top level of a file")
    module, home = sys.modules.get(target.__module__), public_home(target.__module__, name.partition(".")[0])
    if module is not None:
        # modules of an installed package or of Python itself can be imported by workers by their name
        place = getattr(module, "__file__", None)
        folders = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")]
        is_installed = module.__name__ != "__main__"
        if place is not None:
            top = module.__name__.partition(".")[0]
            is_installed = any(map(Path(place).is_relative_to, folders)) or top in packages_distributions()
        if home != target.__module__ or is_installed:
            return f"{home}{'.' if is_dotted else ':'}{name}"
    found = None
    with suppress(TypeError):
        found = inspect.getsourcefile(target)
    file = Path(found).absolute() if found else None
    if file is None or file.suffix != ".py" or not file.is_file():
        raise ConfigError(
            f"{key}: {name} is defined in a notebook or an interactive session, but workers need a file. Write it to a "
            f"file (in a notebook, %%writefile mine.py at the top of its cell) and give its name, 'mine.py:{name}'"
        )
    if target.__module__ == "__main__":
        _check_script(file, name, key)
    return f"{file}:{name}"


def _check_script(file: Path, name: str, key: str) -> None:
    """Refuse a script that does more than define things when it runs: workers run the file to get the function."""
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        is_call = isinstance(statement, ast.Expr | ast.With | ast.For | ast.While)
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        called = {
            getattr(node.func, "id", getattr(node.func, "attr", ""))
            for node in (ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else ())
            if isinstance(node, ast.Call)
        }
        if (is_call and not is_text) or called & {"train", "evaluate"}:
            raise ConfigError(
                f"{key}: workers run {file.name} to get {name}, and line {statement.lineno} would run there as well. "
                f'Put the code that starts the run below `if __name__ == "__main__":`, or {name} into a file of its own'
            )
