"""A contract of import-linter: packages use only names of one another that are public or in a service surface.

`rl_core/__init__.pyi` and the like list public names, `rl_core/service.pyi` those that siblings use. import-linter's
graph has modules and no names, so the contract reads the sources.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output
from importlinter.domain import fields

ROOT = Path(__file__).parents[1]


class SurfaceContract(Contract):
    """Imports between the listed packages name what the imported package declares."""

    type_name = "surface"
    packages = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Compare the imports of every module with the stubs of its siblings."""
        packages = [str(package) for package in self.packages]  # type: ignore[attr-defined]
        declared = {pair for package in packages for pair in declared_names(source_of(package))}
        found = [
            f"{path.relative_to(ROOT)}:{line}: {module}.{name}"
            for package in packages
            for path in sorted(source_of(package).rglob("*.py"))
            for line, module, name in imported_names(path, [each for each in packages if each != package])
            if (module, name) not in declared
        ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports, one a line."""
        for line in check.metadata["found"]:
            output.print_error(line)
        output.print("Use a public name, or add the name to service.pyi of its package (docs/compatibility.md).")


def source_of(package: str) -> Path:
    """Return the folder of a package's source."""
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def declared_names(source: Path) -> Iterator[tuple[str, str]]:
    """Yield what the stubs of a package export: `(package, name)` of each, and `(module, name)` of service names."""
    for stub in source.rglob("*.pyi"):
        dotted = ".".join(stub.relative_to(source.parent).with_suffix("").parts).removesuffix(".__init__")
        for statement in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                for alias in statement.names:
                    yield dotted, alias.asname or alias.name
                    if stub.name == "service.pyi":
                        yield statement.module, alias.name


def imported_names(path: Path, packages: list[str]) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of each import from one of some packages; a module has the name `*`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in packages:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.partition(".")[0] in packages]
            yield from ((node.lineno, module, "*") for module in modules)
