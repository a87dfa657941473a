"""Import one installed package: `python tools/importable.py rl-vllm`.

Run in an environment without an engine. It loads the package's entry points, imports its public names and every module
that needs no engine, and looks up every name that its source takes from a sibling, in modules that need an engine too.
Names in a sibling are looked up in its source, without importing it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import distribution, distributions
from pathlib import Path


@dataclass
class Outcome:
    """The imports that worked, and the ones that failed.

    Args:
        imported: Number of imported modules and loaded entry points.
        engine: Names of modules that need an engine.
        looked_up: Number of names of siblings that the source uses.
        problems: Failures, one line each.
    """

    imported: int = 0
    engine: list[str] = field(default_factory=list)
    looked_up: int = 0
    problems: list[str] = field(default_factory=list)


def imports(name: str) -> Outcome:
    """Import everything of a distribution that an environment without an engine can import.

    Args:
        name: Name of an installed distribution of this project.
    """
    outcome = Outcome()
    ours = {each.name.replace("-", "_") for each in distributions() if each.name.startswith("rl-")}
    package = name.replace("-", "_")
    _import_modules(package, ours, outcome)
    if outcome.problems:
        return outcome
    for entry in distribution(name).entry_points:
        _attempt(entry.load, f"entry point {entry.name} ({entry.group})", ours, outcome)
    public = importlib.import_module(package)
    for each in getattr(public, "__all__", ()):
        _attempt(partial(getattr, public, each), f"{package}.{each}", ours, outcome)
    return outcome


def lookups(name: str) -> Outcome:
    """Look up the names that a distribution's source takes from its siblings.

    Args:
        name: Name of an installed distribution of this project.
    """
    outcome = Outcome()
    package = name.replace("-", "_")
    for module, path in modules(package):
        for sibling, names, line in _taken(ast.parse(path.read_text())):
            if sibling.partition(".")[0] in (package, "") or not sibling.startswith("rl_"):
                continue
            outcome.looked_up += len(names) or 1
            outcome.problems += [f"{module}, line {line}: {each}" for each in _missing(sibling, names)]
    return outcome


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the modules of an installed package: dotted name and file."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    for root in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def _import_modules(package: str, ours: set[str], outcome: Outcome) -> None:
    for module, _ in modules(package):
        if module.endswith(".__main__"):
            continue
        _attempt(partial(importlib.import_module, module), module, ours, outcome)


def _attempt(action: Callable[[], object], what: str, ours: set[str], outcome: Outcome) -> None:
    try:
        action()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ours:
            outcome.problems.append(f"{what}: {error}")
        else:
            outcome.engine.append(what)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is reported
        outcome.problems.append(f"{what}: {type(error).__name__}: {error}")
    else:
        outcome.imported += 1


def _taken(tree: ast.Module) -> Iterator[tuple[str, list[str], int]]:
    """Yield the imports of a module that run: dotted module, the names taken from it, line."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, [alias.name for alias in node.names if alias.name != "*"], node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, [], node.lineno) for alias in node.names)
        else:
            waiting += ast.iter_child_nodes(node)


def _missing(module: str, names: list[str]) -> Iterator[str]:
    bound = _bound(module)
    if bound is None:
        yield f"there is no module {module}"
        return
    for name in names:
        if name not in bound and _file(f"{module}.{name}") is None:
            yield f"{module} has no {name}"


@cache
def _bound(module: str) -> frozenset[str] | None:
    """Return the names that a module binds at its top level; None if there is no such module."""
    path = _file(module)
    if path is None:
        return None
    names: set[str] = set()
    tree = ast.parse(path.read_text() if path.is_file() else "")
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return frozenset(names | _served(tree, path) if "__getattr__" in names else names)


def _served(tree: ast.Module, path: Path) -> set[str]:
    """Return the names that a module's `__getattr__` may serve: those of its stub, and every string in the module."""
    stub = path.with_suffix(".pyi")
    listed = ast.parse(stub.read_text()).body if stub.is_file() else []
    names = {alias.name for each in listed if isinstance(each, ast.ImportFrom) for alias in each.names}
    return names | {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@cache
def _file(module: str) -> Path | None:
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    for root in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        path = root.joinpath(*parts)
        for candidate in (path / "__init__.py", path.with_suffix(".py") if parts else path, path):
            if candidate.is_file() or (candidate == path and path.is_dir()):
                return candidate
    return None


def main() -> int:
    """Print a line of counts and the failures; return 1 if there are any."""
    (name,) = sys.argv[1:]
    found, names = imports(name), lookups(name)
    sys.stdout.write(
        f"{found.imported} modules, names and entry points imported, {len(found.engine)} modules need an engine, "
        f"{names.looked_up} names of siblings looked up\n"
    )
    problems = [*names.problems, *found.problems]
    sys.stderr.write("".join(f"{problem}\n" for problem in problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
