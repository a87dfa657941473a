"""Public names of a package, each imported from its module on first use.

A package lists its public names in `__init__.pyi`, next to its `__init__.py`, as `from package.module import Name as
Name`. Type checkers and editors read that file, and so does `lazy_exports`, so the list exists once:

    from rl_core import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__)

Importing the package then imports none of its modules: a driver reads the config of a backend whose engine is not
installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from types import MappingProxyType

# Importing `typing`, `pathlib` and `ast` would take most of the start of a worker's launcher.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

VERSION = "__version__"


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that has a stub; `__getattr__` serves `__all__` as well.

    The stub is read when the first name is asked for: processes that import a package only to reach one of its modules
    start without.

    Args:
        package: Name of a package or module whose import has begun, `__name__` in its `__init__`. A package at the top
            level also exports `__version__`, the version of its distribution.

    Raises:
        FileNotFoundError: If the package has no stub.
        ImportError: By `__getattr__`, if the package needs another version of rl-core.
    """
    if _stub_of(package) is None:
        raise FileNotFoundError(f"{package} has no __init__.pyi, which lists public names")
    is_top = "." not in package

    def names() -> list[str]:
        return sorted([*homes_of(package), *([VERSION] if is_top else [])])

    def get(name: str) -> Any:
        if name == VERSION and is_top:
            from importlib.metadata import version

            return version(package.replace("_", "-"))
        if name == "__all__":
            return names()
        if name in homes_of(package):
            _check_range(package.partition(".")[0])
            return getattr(_module(package, name, homes_of(package)[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, names


@cache
def _check_range(package: str) -> None:
    """Refuse a package that needs another version of rl-core, as pip does by default.

    Raises:
        ImportError: With both versions and the command that installs one that fits.
    """
    import re
    from importlib.metadata import PackageNotFoundError, requires, version

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", text)))

    distribution = package.replace("_", "-")
    try:
        wanted, present = requires(distribution) or [], version("rl-core")
    except PackageNotFoundError:
        return
    needed = next((text for text in wanted if re.match(r"rl-core\b(?![^;]*;.*extra)", text)), "")
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", needed):
        if (numbers(present) >= numbers(bound)) != (sign == ">="):
            from rl_core.install_command import install_command

            remedy = install_command(distribution)
            raise ImportError(f"{distribution} {version(distribution)} needs {needed}, but {present} is here: {remedy}")


def _module(package: str, name: str, home: str) -> Any:
    """Import the module of a public name.

    Raises:
        ModuleNotFoundError: With the command that installs what it needs, if an extra brings that.
    """
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        from rl_core.install_command import extras_with, install_command

        distribution = package.partition(".")[0].replace("_", "-")
        extras = extras_with(distribution, str(error.name).partition(".")[0])
        if not extras:
            raise
        commands = " or ".join(install_command(f"{distribution}[{extra}]") for extra in extras)
        needs = f"{package}.{name} needs {error.name}, which is not installed here: {commands}"
        raise ModuleNotFoundError(needs, name=error.name, path=error.path) from error


@cache
def homes_of(package: str) -> Mapping[str, str]:
    """Return the module that defines each public name of a package, in the order of its stub.

    Args:
        package: Name of a package or module that is imported, or whose import has begun.

    Raises:
        FileNotFoundError: If the package has no stub.
    """
    import ast

    stub = _stub_of(package)
    if stub is None:
        raise FileNotFoundError(f"{package} has no __init__.pyi, which lists public names")
    with open(stub, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    imports = [statement for statement in tree.body if isinstance(statement, ast.ImportFrom)]
    return MappingProxyType({alias.name: str(each.module) for each in imports for alias in each.names})


def public_home(module: str, name: str) -> str:
    """Return the package that exports a class or function, or the module itself if none does.

    A config that names the package stays valid if the module moves.

    Args:
        module: Name of the imported module that defines it, its `__module__`.
        name: Its name in that module.
    """
    parts = module.split(".")
    packages = (".".join(parts[:count]) for count in range(1, len(parts)))
    exporting = (each for each in packages if _stub_of(each) is not None and homes_of(each).get(name) == module)
    return next(exporting, module)


def public_alternatives(module: str, name: str) -> list[str]:
    """Return the public names to use instead of a name that a module does not have.

    Args:
        module: Name of a module, which need not exist.
        name: Name that was looked up in it.

    Returns:
        `package:Name` of the public names which the module defines, or of the one with the same name; empty if there
        are none.
    """
    package = module.partition(".")[0]
    if _stub_of(package) is None:
        return []
    homes = homes_of(package)
    of_module = [public for public, home in homes.items() if home == module]
    return [f"{package}:{public}" for public in ([name] if name in homes else of_module)]


def has_public_names(package: str) -> bool:
    """Return whether an imported package lists its public names in a stub."""
    return _stub_of(package) is not None


def _stub_of(package: str) -> str | None:
    source = getattr(sys.modules.get(package), "__file__", None)
    stub = f"{os.path.splitext(source)[0]}.pyi" if source else ""
    return stub if os.path.isfile(stub) else None
