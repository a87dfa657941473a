"""A JSON Schema of a config type, so that editors complete and check the YAML of recipes."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, MultipleOf

from rl_core.config.keys import Key, described, entry_type, is_section, members, tuple_types
from rl_core.config.schema import Config
from rl_core.config.signature import NamedConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_INTERPOLATION = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
"""`${...}`, and the mark of a key that the user of a file must set."""

_SCALARS: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer",),
    float: ("number",),
    # unquoted numbers and truth values reach a text field as typed
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

    Unknown keys are refused, and `${...}` may stand for any value. Keys that must be set are required by `required`
    alone, as a file may leave them to the one that it inherits from.
    """

    interpolation: Mapping[str, Any] = {"$ref": "#/$defs/interpolation"}
    """A reference to the texts that may stand for any value."""

    def __init__(self) -> None:
        self._names: dict[type[Config], str] = {}
        self.definitions: dict[str, dict[str, Any]] = {"interpolation": dict(_INTERPOLATION)}

    def section(self, kind: type[Config]) -> dict[str, Any]:
        """A reference to the definition of a type, which is made if there is none."""
        if kind not in self._names:
            name = self._names[kind] = self._free_name(kind.__name__)
            definition: dict[str, Any] = {"type": "object"}
            self.definitions[name] = definition
            if doc := described(kind):
                definition["description"] = doc
            definition["properties"] = {child.path[-1]: self._field(child) for child in Key((), kind).children(None)}
            is_open = issubclass(kind, NamedConfig) and kind.settings_follow_name
            definition["additionalProperties"] = is_open if kind.named is None else self.section(kind.named)
            if is_open:
                # any function or class may be named, and its settings are known when it is
                definition["properties"]["name"]["anyOf"] = [{"type": "string"}, {"type": "null"}]
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def definition(self, kind: type[Config]) -> dict[str, Any]:
        """The definition of a type, to add to."""
        self.section(kind)
        return self.definitions[self._names[kind]]

    def _free_name(self, name: str) -> str:
        taken = self._names.values()
        number = next(count for count in range(1, len(self._names) + 2) if _numbered(name, count) not in taken)
        return _numbered(name, number)

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
        """One type of a union; empty if it admits anything."""
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
            bounds = _lengths("Length", constraints) if kind is str else _bounds(constraints)
            return {"type": accepted[0] if len(accepted) == 1 else list(accepted), **bounds}
        if (values := entry_type(kind, "")) is not None:
            return {
                "type": "object",
                "additionalProperties": self._value(values),
                **_lengths("Properties", constraints),
            }
        if (items := entry_type(kind, 0)) is not None:
            fixed = tuple_types(kind)
            entries = {"prefixItems": [self._value(each) for each in fixed], "items": False} if fixed else {}
            return {"type": "array", "items": self._value(items), **entries, **_lengths("Items", constraints)}
        return {} if kind is Any else {"type": "string"}


def required(kind: type[Config]) -> dict[str, Any]:
    """Keys of a section that must be set, and those of the sections directly below."""
    children = Key((), kind).children(None)
    names = [str(child.path[-1]) for child in children if child.required]
    below = {
        str(child.path[-1]): inner
        for child in children
        if len(child.kinds) == 1 and is_section(child.kinds[0]) and (inner := required(child.kinds[0]))
    }
    return {**({"required": names} if names else {}), **({"properties": below} if below else {})}


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}{number}"


def _bounds(constraints: Any) -> dict[str, Any]:
    known = [(item, *_NUMBER_BOUNDS[type(item)]) for item in constraints if type(item) in _NUMBER_BOUNDS]
    return {name: getattr(item, attribute) for item, name, attribute in known}


def _lengths(of: str, constraints: Any) -> dict[str, Any]:
    known = [(item, *_LENGTHS[type(item)]) for item in constraints if type(item) in _LENGTHS]
    return {f"{name}{of}": getattr(item, attribute) for item, name, attribute in known}
