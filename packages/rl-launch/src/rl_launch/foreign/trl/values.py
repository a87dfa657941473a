"""Values of a Python script that is not run: constants are Python's own, the rest are `Thing` or `Data`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

SCRIPTS: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "scripts.yaml").read_text(encoding="utf-8"))
"""Tables of the functions, methods and arguments that scripts use."""

TRACKED = frozenset({"adapters", "config", "data", "model", "quantization", "tokenizer", "trainer"})
"""Roles of the values that training depends on."""

_DTYPES = ("bfloat16", "float16", "float32", "half")
_ENUMS = ("Split", "SchedulerType", "IntervalStrategy", "SaveStrategy", "HubStrategy", "OptimizerNames")
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}  # fmt: skip
_MAX_BITS = 4096
"""Maximum size of an integer that is multiplied or raised to a power."""


class NotConstant(Exception):
    """Raised if a value is not known without running the script."""


@dataclass(eq=False)
class Thing:
    """A value that is not a constant.

    Args:
        role: One of `TRACKED`, or `function`, `class`, `import`, `instance`, `partial`, `splits`, `parser`, `options`;
            empty for a value that is not known.
        name: Name of the class, the function or the import.
        lines: Lines of the script that computed it, for a value that is not known.
        touches: Roles of the values that it was computed from.
        parts: Attributes, arguments or entries that are known.
        node: Definition of a function or class.
    """

    role: str = ""
    name: str = ""
    lines: tuple[int, ...] = ()
    touches: frozenset[str] = frozenset()
    parts: dict[str, Any] = field(default_factory=dict)
    node: Any = None

    @property
    def last_name(self) -> str:
        """The name without the modules before it."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Data:
    """A dataset of the script.

    Args:
        settings: Keys of the dataset here; several for a concatenation.
        held_out: Rows of it, or their share, that the script splits off for validation.
        is_held_out: True for the rows that are split off.
        keeps_order: True if a slice of its rows is a slice of the rows of its source.
    """

    settings: tuple[Mapping[str, Any], ...]
    held_out: float | None = None
    is_held_out: bool = False
    keeps_order: bool = True

    def with_settings(self, **values: Any) -> Data:
        """Return the dataset with other settings, which must be a single one."""
        [only] = self.settings
        return replace(self, settings=({**only, **values},))


def role_of(value: Any) -> str:
    """Return the role of a value; empty for a constant."""
    return "data" if isinstance(value, Data) else value.role if isinstance(value, Thing) else ""


def parts_of(value: Any) -> Iterator[Any]:
    """Yield a value and all values inside it."""
    yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ():
        yield from parts_of(each)


def touched(*values: Any) -> frozenset[str]:
    """Return the tracked roles of values and of the values that they were computed from."""
    roles: set[str] = set()
    for value in parts_of(values):
        roles |= {"data" if role_of(value) == "splits" else role_of(value)}
        roles |= value.touches if isinstance(value, Thing) else set()
    return frozenset(roles & TRACKED)


def unknown(*values: Any, name: str = "") -> Thing:
    """Return a value that was computed from others."""
    lines = {line for value in parts_of(values) if isinstance(value, Thing) and not value.role for line in value.lines}
    return Thing(name=name, lines=tuple(sorted(lines)), touches=touched(*values))


def plain(value: Any) -> Any:
    """Return a value as a constant.

    Raises:
        NotConstant: If it is not one.
    """
    match value:
        case Thing(role="import") if value.name.startswith("torch.") and value.last_name in _DTYPES:
            return "float16" if value.last_name == "half" else value.last_name
        case Thing(role="import") if any(f"{name}." in value.name for name in _ENUMS):
            return value.last_name.lower()
        case Thing() | Data():
            raise NotConstant
        case dict():
            return {plain(key): plain(each) for key, each in value.items()}
        case list() | tuple() | set():
            return [plain(each) for each in value]
        case range():
            return list(value)
        case _:
            return value


def is_constant(value: Any) -> bool:
    """Return whether a value is known without running the script."""
    try:
        plain(value)
    except NotConstant:
        return False
    return True


def is_made(value: Any) -> bool:
    """Return whether a value is an object that the script makes, which is not None."""
    return role_of(value) not in ("", "import", "options")


def folded(kind: ast.AST, left: Any, right: Any) -> Any:
    """Return the result of a binary operator or a comparison; unknown if an operand is.

    Args:
        kind: The operator, as `ast` has it.
        left: Left operand.
        right: Right operand.
    """
    if isinstance(kind, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and right is None and is_made(left):
        return isinstance(kind, ast.IsNot | ast.NotEq)
    if not (is_constant(left) and is_constant(right)):
        return unknown(left, right)
    if isinstance(left, int) and isinstance(right, int):
        times = right if isinstance(kind, ast.Pow) else 1
        if left.bit_length() * times > _MAX_BITS:  # nothing interrupts Python while it computes 9**9**9
            return unknown(left, right)
    try:
        if isinstance(kind, ast.Div) and isinstance(left, str):
            return f"{left.rstrip('/')}/{right}"  # this is how pathlib joins a path
        return _OPERATORS[type(kind)](left, right)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return unknown(left, right)
