"""The base of every config type, problems that validators raise, and types assembled from the sections of plugins."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rl_core.config.tree import KeyPath
from rl_core.errors import Problem

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

    named: ClassVar[type[Config] | tuple[type[Config], ...] | None] = None
    """The type of further sections, whose names are up to the user, or the types if they have several kinds; None if
    there are none."""

    read_when_off: ClassVar[frozenset[str]] = frozenset()
    """Keys of a section with `enabled` that may take effect although that is false. All others are refused then."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    _references: dict[KeyPath, str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> Mapping[KeyPath, str]:
        """Interpolations of environment variables by key path, as they were written; `resolve` sets them on a root."""
        return self._references

    def with_references(self, references: Mapping[KeyPath, str]) -> Self:
        """Return the config with these references."""
        config = self.model_copy()
        config._references = dict(references)
        return config


def plain(value: Any) -> Any:
    """Return a value of a config as nested dicts, lists and scalars, as YAML can hold it."""
    return to_jsonable_python(value, inf_nan_mode="constants")


def is_changed(section: Config, key: str) -> bool:
    """Return whether a key of a section has another value than its default.

    A check that refuses keys without effect asks this, not which keys are written: the config that a run writes names
    every key, and must load back.
    """
    default: Any = type(section).model_fields[key].get_default(call_default_factory=True)
    return bool(getattr(section, key) != default)


def _check_variables(variables: dict[str, str]) -> dict[str, str]:
    if problems := [problem for name in variables if (problem := _variable_problem(name))]:
        raise ProblemError(*problems)
    return variables


def _variable_problem(name: str) -> Problem | None:
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


class Parts(NamedTuple):
    """Parts of an assembled type, for another process to assemble it again.

    Args:
        name: Name of the type.
        base: Type that it extends, or the parts of an assembled one.
        sections: Key, type (or its parts) and default of each section.
        defaults: Keys of the base with their other defaults.
    """

    name: str
    base: Any
    sections: tuple[tuple[str, Any, Any], ...]
    defaults: tuple[tuple[str, Any], ...]


class Assembled(Config):
    """Base of assembled types. Their values pickle by the parts of the type, because no module holds it."""

    parts_of_type: ClassVar[Parts]

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (self.parts_of_type,), self.__getstate__()


_BUILT: dict[Any, type[Assembled]] = {}
"""Assembled types by their parts: each reading of a config asks for the same ones, which take pydantic some time."""


def assemble(
    name: str,
    sections: Mapping[str, Section],
    *,
    base: type[Config] = Config,
    defaults: Mapping[str, Any] | None = None,
) -> type[Config]:
    """Return a strict config type with the sections of several parties, or a section (`base`) with further keys.

    A section whose fields all have defaults may be left out by the user. Sections may be assembled themselves:
    `assemble("Root", {"policy": assemble("Policy", {"dtensor_cfg": DTensorConfig}, base=PolicyConfig)})`.
    Values of an assembled type pickle into any process that can import the parts. Equal parts give the same type.

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
    others = defaults or {}
    known = [(key, kind, *_compared(default)) for key, (kind, default) in pairs.items()]
    identity = (name, base, *known, *((key, *_compared(default)) for key, default in others.items()))
    if identity in _BUILT:
        return _BUILT[identity]
    fields: dict[str, Any] = {}
    for key, (kind, default) in pairs.items():
        if default is Default.OF_TYPE:
            required = any(field.is_required() for field in kind.model_fields.values())
            default = Field() if required else Field(default_factory=kind)
        fields[key] = (kind, default)
    for key, default in others.items():
        field = copy(base.model_fields[key])
        field.default, field.default_factory = default, None
        fields[key] = (field.annotation, field)
    bases: Any = (base,) if issubclass(base, Assembled) else (Assembled, base)
    built: type[Assembled] = create_model(
        name,
        __base__=bases,
        __module__=base.__module__,
        __doc__=None if base is Config else base.__doc__,
        # The parts document the fields. Otherwise pydantic would search all loaded modules for their source.
        __cls_kwargs__={"use_attribute_docstrings": False},
        **fields,
    )
    portable = tuple((key, _portable(kind), default) for key, (kind, default) in pairs.items())
    built.parts_of_type = Parts(name, _portable(base), portable, tuple(others.items()))
    _BUILT[identity] = built
    return built


def _compared(default: Any) -> tuple[Any, ...]:
    """Return the values by which two defaults are compared. The text of a field has only the name of its factory, which
    is `<lambda>` for many; the built type keeps the factory, so that its id stays its own."""
    factory = default.default_factory if isinstance(default, FieldInfo) else None
    return type(default), repr(default), id(factory)


def _narrows(part: Section, base: type[Config], key: str) -> bool:
    inherited: Any = base.model_fields[key].annotation
    part = part[0] if isinstance(part, tuple) else part
    if not (isinstance(inherited, type) and issubclass(inherited, Config)):
        return False
    return isinstance(part, type) and issubclass(part, inherited)


def _portable(kind: Any) -> Any:
    return kind.parts_of_type if isinstance(kind, type) and issubclass(kind, Assembled) else kind


def _type(portable: Any) -> Any:
    if not isinstance(portable, Parts):
        return portable
    name, base, sections, defaults = portable
    pairs = {key: (_type(kind), default) for key, kind, default in sections}
    return assemble(name, pairs, base=_type(base), defaults=dict(defaults))


def _blank(parts: Parts) -> Assembled:
    kind = _type(parts)
    blank: Assembled = kind.__new__(kind)
    return blank


class NamedConfig(Config):
    """A section that chooses a function or class by `name`; its other keys are the settings of that function."""

    settings_follow_name: ClassVar[bool] = True
    """True if `name` may be any function or class, whose keys then replace the keys of the type; False if the keys are
    fixed and `name` is only the short form of the section."""

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written


def section_of(target: Callable[..., Any], base: type[Config], *, derived: Collection[str] = ()) -> type[Config]:
    """Return a section with the keys of `base`, and in addition the settings of a function or dataclass.

    Settings of a function are its keyword-only parameters, settings of a dataclass its fields, and settings of another
    class the keyword-only parameters of its constructor. Keys have their annotations as types, with bounds
    that `Annotated` gives (`Annotated[float, Field(ge=0)]`), and their defaults.

    Args:
        target: The function or class.
        base: The keys that choose it.
        derived: Settings that follow from other keys, and get no key.

    Raises:
        ValueError: If a setting has no annotation, one that cannot be resolved, or the name of a key of `base`.
    """
    name = getattr(target, "__name__", str(target))
    try:
        has_constructor = isinstance(target, type) and not dataclasses.is_dataclass(target)
        hints = get_type_hints(target.__init__ if has_constructor else target, include_extras=True)
    except NameError as error:
        raise ValueError(f"an annotation of {name} cannot be resolved: {error}") from None
    defaults = {key: default for key, default in _defaults(target).items() if key not in derived}
    for key in defaults:
        if key in base.model_fields:
            raise ValueError(f"{name} has a setting {key!r}, which is the key that chooses {name}; rename the setting")
        if key not in hints:
            raise ValueError(f"the setting {key!r} of {name} has no type annotation, such as {key}: float")
    return assemble(name, {key: (hints[key], default) for key, default in defaults.items()}, base=base)


def settings_of(section: Config) -> dict[str, Any]:
    """Return the settings in a section that `section_of` made."""
    chosen_by = next(kind for kind in type(section).__mro__ if not issubclass(kind, Assembled))
    assert issubclass(chosen_by, Config)
    return {key: getattr(section, key) for key in type(section).model_fields if key not in chosen_by.model_fields}


def _defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a function or dataclass, with their defaults as pydantic takes them."""
    if dataclasses.is_dataclass(target):
        found: dict[str, Any] = {}
        for field in dataclasses.fields(target):
            if field.init and field.default_factory is not dataclasses.MISSING:
                found[field.name] = Field(default_factory=field.default_factory)
            elif field.init:
                found[field.name] = ... if field.default is dataclasses.MISSING else field.default
        return found
    parameters = inspect.signature(target).parameters.values()
    return {
        each.name: ... if each.default is each.empty else each.default
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
    }
