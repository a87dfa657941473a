"""Public names of a package: they exist, are documented, and hide no module.

class TestPublicNames(PublicNamesSuite):
    packages = ("my_package",)
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import ClassVar

from rl_core.exports import homes_of


class PublicNamesSuite:
    """Tests of packages that export their public API with `rl_core.lazy_exports`.

    Set `packages`. Every module that defines a public name must be importable where the
    tests run.
    """

    packages: ClassVar[tuple[str, ...]]

    def test_every_public_name_is_defined_in_the_module_that_the_stub_names(self) -> None:
        """Show that a class or function is exported from the module that defines it."""
        for package in self.packages:
            module = importlib.import_module(package)
            for name, home in homes_of(package).items():
                found = getattr(module, name)
                is_named = inspect.isclass(found) or inspect.isfunction(found)
                assert not is_named or found.__module__ == home, f"{package}.{name}"

    def test_all_lists_the_public_names_in_order(self) -> None:
        """Show that `__all__` and `dir()` are sorted and equal to the stub."""
        for package in self.packages:
            module = importlib.import_module(package)
            assert module.__all__ == sorted(module.__all__) == dir(module)
            assert set(module.__all__) - {"__version__"} == set(homes_of(package))

    def test_every_public_name_is_documented(self) -> None:
        """Show that each has a docstring; a constant has a string below it."""
        undocumented = [
            f"{package}.{name}" for package in self.packages for name, text in summaries_of(package).items() if not text
        ]
        assert not undocumented, undocumented

    def test_no_public_name_is_that_of_a_module(self) -> None:
        """Show that no module replaces a public name when it is imported."""
        for package in self.packages:
            module = importlib.import_module(package)
            is_package = hasattr(module, "__path__")
            names = [name for name in module.__all__ if is_package and importlib.util.find_spec(f"{package}.{name}")]
            assert not names, f"modules of {package} have the same names: {names}"


def summaries_of(package: str) -> dict[str, str]:
    """Return the first paragraph of each public name's docstring, sorted by name; empty if it has none.

    The source files are read and not imported, so the engine of a backend need not be installed.

    Args:
        package: Name of an importable package with a stub of its public API.
    """
    root = Path(str(importlib.import_module(package.partition(".")[0]).__file__)).parent
    importlib.import_module(package)
    texts = {name: _docstring_of(root, home, name) for name, home in sorted(homes_of(package).items())}
    return {name: " ".join(text.partition("\n\n")[0].split()) for name, text in texts.items()}


def _docstring_of(root: Path, module: str, name: str) -> str:
    """Return the docstring of a name that a module defines, imports from another, or contains as a module."""
    path = root.joinpath(*module.split(".")[1:])
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(source.read_text(encoding="utf-8")).body
    for index, statement in enumerate(body):
        if name in _names_of(statement):
            return _docstring(body, index)
        if isinstance(statement, ast.ImportFrom) and any(alias.name == name for alias in statement.names):
            return _docstring_of(root, str(statement.module), name)
    within = path / f"{name}.py"
    return ast.get_docstring(ast.parse(within.read_text(encoding="utf-8"))) or "" if within.is_file() else ""


def _names_of(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=[ast.Tuple(elts=names)]):
            return [ast.unparse(each) for each in names]
        case _:
            return []


def _docstring(body: list[ast.stmt], index: int) -> str:
    """Return the docstring of a definition, or the string below an assignment."""
    statement = body[index]
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(statement) or ""
    match body[index + 1 : index + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return inspect.cleandoc(text)
        case _:
            return ""
