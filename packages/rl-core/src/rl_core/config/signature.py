"""Sections whose keys are the settings of a function or class that the user chose."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any, ClassVar, get_type_hints

from pydantic import Field, model_validator

from rl_core.config.schema import Assembled, Config, assemble


class NamedConfig(Config):
    """A section that chooses a function or class by `name`; its other keys are the settings of that."""

    settings_follow_name: ClassVar[bool] = True
    """True if `name` may be any function or class, whose keys then replace those of the type; False if the keys are
    fixed and `name` is only the short form of the section."""

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written


def section_of(target: Callable[..., Any], base: type[Config], *, derived: Collection[str] = ()) -> type[Config]:
    """A section with the keys of `base`, and in addition to them the settings of a function or dataclass.

    Settings of a function are its keyword-only parameters, those of a dataclass its fields, those of another class the
    keyword-only parameters of its constructor. Their annotations are the types of the keys, their defaults those of the
    keys.

    Args:
        target: The function or class.
        base: The keys that choose it.
        derived: Settings that follow from other keys, and have none of their own.

    Raises:
        ValueError: If a setting has no annotation, one that cannot be resolved, or the name of a key of `base`.
    """
    name = getattr(target, "__name__", str(target))
    try:
        has_constructor = isinstance(target, type) and not dataclasses.is_dataclass(target)
        hints = get_type_hints(target.__init__ if has_constructor else target)
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
    """The settings in a section that `section_of` made."""
    chosen_by = next(kind for kind in type(section).__mro__ if not issubclass(kind, Assembled))
    assert issubclass(chosen_by, Config)
    return {key: getattr(section, key) for key in type(section).model_fields if key not in chosen_by.model_fields}


def _defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """The settings of a function or dataclass, with their defaults as pydantic takes them."""
    if dataclasses.is_dataclass(target):
        return {field.name: _of_field(field) for field in dataclasses.fields(target) if field.init}
    parameters = inspect.signature(target).parameters.values()
    return {
        each.name: ... if each.default is each.empty else each.default
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
    }


def _of_field(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default
