"""The base of every config type, the problems that its validators raise, and types assembled from plugins' sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Self
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, create_model
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rl_core.config.tree import KeyPath
from rl_core.problems import Problem

_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

SET_BY_THE_LAUNCHER = {
    "CUDA_VISIBLE_DEVICES": "each worker sees the devices that it was placed on; choose them by the keys of `cluster`",
    "LOCAL_RANK": "ranks are numbered by placement",
    "MASTER_ADDR": "ranks meet at an address that is reserved for each start",
    "MASTER_PORT": "ranks meet at a port that is reserved for each start",
    "PYTHONHOME": "each worker has the interpreter of its own environment",
    "RANK": "ranks are numbered by placement",
    "VIRTUAL_ENV": "each worker has the interpreter of its own environment",
    "WORLD_SIZE": "ranks are numbered by placement",
}
"""Environment variables that no config may set, and why."""


class ProblemError(ValueError):
    """Raised in a section's validator to blame keys of that section rather than the section as a whole.

    Args:
        problems: Problems with keys relative to the section.
    """

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(": ".join(filter(None, (problem.key, problem.message))) for problem in self.problems)


class WhenChanged(Enum):
    """When a key of a started run may change, from the least to the most restrictive.

    It is given for a field, as in `save_period: Annotated[int, WhenChanged.RESUME]`, or for a whole section by its
    `when_changed`; the one closest to a key holds.
    """

    RESUME = "may change when it is resumed"
    GOAL = "may change when it is resumed, and lets a finished run continue"
    BRANCH = "a change needs a branch"
    NEW_RUN = "a change needs a new run"


@dataclass(frozen=True)
class NamesPath:
    """Marks a string that is, or may be, the path of a file or folder: two such strings are equal if they refer to the
    same path."""


@dataclass(frozen=True)
class Rename:
    """The rename of a key of an earlier version.

    Args:
        now: The key of this version, relative to the section, with words on its value if that is not the same.
        values: Function from its value and all values of its section to values by key of this version, relative to the
            section; empty if the value needs no key.
    """

    now: str
    values: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ProblemError(Problem("", "is empty", got=text, remedy="Write a path or a name, or remove the key"))
    return text


PathText = Annotated[str, NamesPath(), AfterValidator(_not_empty)]
"""The path of a file or folder, or something else if there is no such file."""


class Config(BaseModel):
    """A frozen, strictly typed group of settings; the docstring under a field is its documentation.

    Unknown keys are refused, and no value changes its type on the way in, except that a float field takes an int.
    """

    when_changed: ClassVar[WhenChanged | None] = None
    """The rule of the keys below that have none of their own; None leaves it to the section around."""

    also_called: ClassVar[Mapping[str, str]] = {}
    """Names that keys of this section have in other sections or other libraries, and the keys: the error for such a
    name shows the key."""

    renamed: ClassVar[Mapping[str, Rename]] = {}
    """Keys that this section had in earlier versions; see `rl_core.config.renames`. A key of this version is among them
    if it took other values."""

    before_it_existed: ClassVar[Mapping[str, Any]] = {}
    """Values of keys in the recorded config of a run that does not have them, because its version did not: the values
    that mean what that version did, if the defaults do not."""

    named: ClassVar[type[Config] | None] = None
    """The type of further sections, whose names are up to the user; None if there are none."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="constants",
    )

    _references: dict[KeyPath, str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> Mapping[KeyPath, str]:
        """Interpolations of environment variables by key path, as they were written; `resolve` sets them on a root."""
        return self._references

    def with_references(self, references: Mapping[KeyPath, str]) -> Self:
        """The same config with these references."""
        config = self.model_copy()
        config._references = dict(references)
        return config


def plain(value: Any) -> Any:
    """A value of a config as nested dicts, lists and scalars, as YAML can hold it."""
    return to_jsonable_python(value, inf_nan_mode="constants")


def is_changed(section: Config, key: str) -> bool:
    """Return whether a key of a section has another value than its default.

    A check that refuses keys without effect asks this, not which keys are written: the config that a run writes names
    every key, and must load back.
    """
    default: Any = type(section).model_fields[key].get_default(call_default_factory=True)
    return bool(getattr(section, key) != default)


def _check_variables(variables: dict[str, str]) -> dict[str, str]:
    problems = [problem for name in variables if (problem := _refusal(name))]
    if problems:
        raise ProblemError(*problems)
    return variables


def _refusal(name: str) -> Problem | None:
    if not _VARIABLE_NAME.fullmatch(name):
        remedy = "Use letters, digits and underscores"
        return Problem(name, "is not a valid name for an environment variable", remedy=remedy)
    if name in SET_BY_THE_LAUNCHER:
        return Problem(name, f"is set by the launcher: {SET_BY_THE_LAUNCHER[name]}", remedy="Remove it here")
    if name.startswith("RAY_"):
        return Problem(name, "is read only when Ray starts", remedy="Set it where you start Ray, and remove it here")
    return None


EnvVars = Annotated[dict[str, str], AfterValidator(_check_variables)]
"""Environment variables of workers by name; an empty string clears a variable."""

Section = type[Config] | tuple[Any, Any]
"""A section's type, or a type and its default: a value, `...` for none, or pydantic's `Field(...)`."""


class Default(Enum):
    """A default that is not a value."""

    OF_TYPE = "the section's type, given no keys"


@dataclass(frozen=True)
class Assembly:
    """How a type was put together, so that its values pickle although no module holds the type.

    Args:
        token: Names the type in every process that its values reach.
        base: The type extended, or its assembly.
        sections: Key, type (or its assembly) and default.
        defaults: Key of the base and the default that it has in place of its own.
    """

    token: str
    name: str
    base: Any
    sections: tuple[tuple[str, Any, Any], ...]
    defaults: tuple[tuple[str, Any], ...]


class Assembled(Config):
    """Base of assembled types."""

    assembly: ClassVar[Assembly]

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.assembly,), self.__getstate__()


_BUILT: dict[str, type[Assembled]] = {}


def assemble(
    name: str,
    sections: Mapping[str, Section],
    *,
    base: type[Config] = Config,
    defaults: Mapping[str, Any] | None = None,
) -> type[Config]:
    """A strict config type with the sections of several parties, or a section (`base`) with the keys of others in it.

    A section whose fields all have defaults may be left out by the user. Sections may be assembled themselves:
    `assemble("Root", {"policy": assemble("Policy", {"dtensor_cfg": DTensorConfig}, base=PolicyConfig)})`.
    Values of an assembled type pickle into any process that can import the parts.

    Args:
        name: Name of the type.
        sections: Key to type, or to (type, default).
        base: The type that it extends.
        defaults: Other defaults for keys of `base`.

    Raises:
        ValueError: If `base` has one of the keys already, unless as a section whose type this one extends.
    """
    taken = sorted(key for key, part in sections.items() if key in base.model_fields and not _narrows(part, base, key))
    if taken:
        raise ValueError(f"{base.__name__} has {', '.join(taken)} already: two parties claim the same config key")
    pairs = {key: part if isinstance(part, tuple) else (part, Default.OF_TYPE) for key, part in sections.items()}
    parts = [name, base, *((key, kind, _compared(default)) for key, (kind, default) in pairs.items())]
    parts += [(key, _compared(default)) for key, default in (defaults or {}).items()]
    # every reading of a config asks for the same types, which take pydantic tens of milliseconds
    found = _BY_PARTS.get(tuple(parts))
    if found is None:
        portable = tuple((key, _portable(kind), default) for key, (kind, default) in pairs.items())
        found = _build(Assembly(uuid4().hex, name, _portable(base), portable, tuple((defaults or {}).items())))
        _BY_PARTS[tuple(parts)] = found
    return found


_BY_PARTS: dict[tuple[Any, ...], type[Assembled]] = {}


def _compared(default: Any) -> Any:
    """What two defaults are compared by: their types and values, or, if these cannot be told, themselves."""
    if default is None or default is ... or isinstance(default, str | int | float | bool | Enum):
        return type(default), default
    return (type(default), repr(default)) if isinstance(default, Config) else _Same(default)


@dataclass(frozen=True)
class _Same:
    """Equal only to what holds the same object, which it keeps."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def _narrows(part: Section, base: type[Config], key: str) -> bool:
    inherited: Any = base.model_fields[key].annotation
    part = part[0] if isinstance(part, tuple) else part
    if not (isinstance(inherited, type) and issubclass(inherited, Config)):
        return False
    return isinstance(part, type) and issubclass(part, inherited)


def _portable(kind: Any) -> Any:
    return kind.assembly if isinstance(kind, type) and issubclass(kind, Assembled) else kind


def _type(portable: Any) -> Any:
    if not isinstance(portable, Assembly):
        return portable
    return _BUILT.get(portable.token) or _build(portable)


def _build(assembly: Assembly) -> type[Assembled]:
    base = _type(assembly.base)
    fields: dict[str, Any] = {key: _field(_type(kind), default) for key, kind, default in assembly.sections}
    fields |= {key: _redefined(base.model_fields[key], default) for key, default in assembly.defaults}
    bases = (base,) if issubclass(base, Assembled) else (Assembled, base)
    doc = None if base is Config else base.__doc__
    built = create_model(
        assembly.name,
        __base__=bases,
        __module__=base.__module__,
        __doc__=doc,
        # the parts describe its fields: pydantic would search all loaded modules for its source
        __cls_kwargs__={"use_attribute_docstrings": False},
        **fields,
    )
    built.assembly = assembly
    _BUILT[assembly.token] = built
    return built


def _field(kind: Any, default: Any) -> tuple[Any, Any]:
    if default is not Default.OF_TYPE:
        return kind, default
    required = any(field.is_required() for field in kind.model_fields.values())
    return kind, Field() if required else Field(default_factory=kind)


def _redefined(field: FieldInfo, default: Any) -> tuple[Any, Any]:
    """A field as it is, except its default."""
    changed = copy(field)
    changed.default, changed.default_factory = default, None
    return field.annotation, changed


def _blank(assembly: Assembly) -> Assembled:
    kind = _type(assembly)
    return kind.__new__(kind)
