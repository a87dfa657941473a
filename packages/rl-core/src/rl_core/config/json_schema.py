"""A JSON Schema of a config type, so that editors complete and check the YAML of recipes."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf

from rl_core.config.keys import Key, described, entry_type, is_section, members, tuple_types
from rl_core.config.schema import Config, NamedConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The version of JSON Schema that schemas of configs are written in."""

_INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
"""`${...}`, and the mark of a key that the user of a file must set."""

_SCALARS: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer",),
    float: ("number",),
    # Unquoted numbers and truth values reach a string field as typed.
    str: ("string", "number", "boolean"),
}
_NUMBER_BOUNDS = {
    Gt: ("exclusiveMinimum", "gt"),
    Ge: ("minimum", "ge"),
    Lt: ("exclusiveMaximum", "lt"),
    Le: ("maximum", "le"),
    MultipleOf: ("multipleOf", "multiple_of"),
}
_LENGTHS = {MinLen: ("min", "min_length"), MaxLen: ("max", "max_length")}


class JsonSchema:
    """Definitions of config types, gathered for one JSON Schema (draft 2020-12).

    Unknown keys are refused, and `${...}` may replace any value. Only `required` requires keys that must be set,
    because a file may inherit them from another one.
    """

    interpolation: Mapping[str, Any] = {"$ref": "#/$defs/interpolation"}
    """Reference to the strings that may replace any value."""

    def __init__(self) -> None:
        self._names: dict[type[Config], str] = {}
        self.definitions: dict[str, dict[str, Any]] = {"interpolation": dict(_INTERPOLATION)}

    def section(self, kind: type[Config]) -> dict[str, Any]:
        """Return a reference to the definition of a type, which is created if there is none."""
        if kind not in self._names:
            name = self._names[kind] = self._free_name(kind.__name__)
            definition: dict[str, Any] = {"type": "object"}
            self.definitions[name] = definition
            if doc := described(kind):
                definition["description"] = doc
            definition["properties"] = {child.path[-1]: self._field(child) for child in Key((), kind).children(None)}
            is_open = issubclass(kind, NamedConfig) and kind.settings_follow_name
            definition["additionalProperties"] = is_open if kind.named is None else self.any_of(kind.named)
            if is_open:
                # The name may be any function or class, whose settings are not known here.
                definition["properties"]["name"]["anyOf"] = [{"type": "string"}, {"type": "null"}]
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def any_of(self, kinds: type[Config] | tuple[type[Config], ...]) -> dict[str, Any]:
        """Return a reference to the definition of a type, or the choice among several."""
        if isinstance(kinds, tuple):
            return {"anyOf": [self.section(kind) for kind in kinds]}
        return self.section(kinds)

    def definition(self, kind: type[Config]) -> dict[str, Any]:
        """Return the definition of a type, which the caller may extend."""
        self.section(kind)
        return self.definitions[self._names[kind]]

    def _free_name(self, name: str) -> str:
        taken = set(self._names.values())
        numbered = (name if count == 1 else f"{name}{count}" for count in range(1, len(taken) + 2))
        return next(each for each in numbered if each not in taken)

    def _field(self, key: Key) -> dict[str, Any]:
        schema = self._value(key.annotation, key.field.metadata if key.field else ())
        if key.field is not None and key.field.description:
            schema["description"] = key.field.description
        has_section = any(is_section(kind) for kind in key.kinds)
        if not key.required and not has_section:
            schema["default"] = key.default
        return schema

    def _value(self, annotation: Any, constraints: Any = ()) -> dict[str, Any]:
        choices = [self._member(kind, bound) for kind, bound in members(annotation, constraints)]
        if any(not choice for choice in choices):
            return {}
        if any(choice.get("type") != "string" for choice in choices):
            choices.append(dict(self.interpolation))
        return choices[0] if len(choices) == 1 else {"anyOf": choices}

    def _member(self, kind: Any, constraints: Any) -> dict[str, Any]:
        """Return the schema of one type of a union; empty if it admits anything."""
        if kind is types.NoneType:
            return {"type": "null"}
        if get_origin(kind) is Literal:
            return {"enum": list(get_args(kind))}
        if isinstance(kind, type) and issubclass(kind, Enum):
            return {"enum": [member.value for member in kind]}
        if is_section(kind):
            section = self.section(kind)
            return {"anyOf": [{"type": "string"}, section]} if issubclass(kind, NamedConfig) else section
        if kind in _SCALARS:
            accepted = _SCALARS[kind]
            bounds = _lengths("Length", constraints)
            if kind is not str:
                known = [(item, *_NUMBER_BOUNDS[type(item)]) for item in constraints if type(item) in _NUMBER_BOUNDS]
                bounds = {name: getattr(item, attribute) for item, name, attribute in known}
            return {"type": accepted[0] if len(accepted) == 1 else list(accepted), **bounds}
        if (values := entry_type(kind, "")) is not None:
            lengths = _lengths("Properties", constraints)
            return {"type": "object", "additionalProperties": self._value(values), **lengths}
        if (items := entry_type(kind, 0)) is not None:
            fixed = tuple_types(kind)
            entries = {"prefixItems": [self._value(each) for each in fixed], "items": False} if fixed else {}
            return {"type": "array", "items": self._value(items), **entries, **_lengths("Items", constraints)}
        return {} if kind is Any else {"type": "string"}


def required(kind: type[Config]) -> dict[str, Any]:
    """Return the keys of a section that must be set, and the required keys of the sections directly below."""
    children = Key((), kind).children(None)
    names = [str(child.path[-1]) for child in children if child.required]
    below = {
        str(child.path[-1]): inner
        for child in children
        if len(child.kinds) == 1 and is_section(child.kinds[0]) and (inner := required(child.kinds[0]))
    }
    return {**({"required": names} if names else {}), **({"properties": below} if below else {})}


def _lengths(of: str, constraints: Any) -> dict[str, Any]:
    known = [(item, *_LENGTHS[type(item)]) for item in constraints if type(item) in _LENGTHS]
    return {f"{name}{of}": getattr(item, attribute) for item, name, attribute in known}
