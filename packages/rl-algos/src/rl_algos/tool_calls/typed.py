"""Arguments that were written as plain text, with the types that the schema of their tool asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_core.model_json import MalformedJson, read_model_json

_MAX_REFERENCES = 8
"""Maximum depth of references and unions in a schema that are followed."""
_PYTHON = {"True": True, "False": False, "None": None}
"""Values that policies write as Python does."""


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of an argument.

    A text that is the JSON of a value of one of the schema's types is that value; the string type comes last, so with
    `["string", "null"]` the text `null` is None. Any other text stays as it is, and the tool says what it expects.

    Args:
        text: As the policy wrote it.
        schema: JSON schema of the argument; one without types, such as None, asks for a string.
        root: Schema of all arguments, in which references are looked up.

    Raises:
        MalformedJson: If it must be a list or an object, begins like one and cannot be read.
    """
    types = types_of(schema, root)
    if types <= {"string"} or _is_choice(text, schema):
        return text
    try:
        value = read_model_json(text)
    except MalformedJson:
        if "string" in types:
            return text
        if types & {"array", "object"} and text.lstrip().startswith(("[", "{")):
            raise
        value = _PYTHON.get(text.strip(), text)
    return value if _type_names(value) & (types - {"string"}) else text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return frozenset()
    types = _own_types(schema) or types_of(_referred(schema, root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        types = types or frozenset().union(*(types_of(each, root, depth + 1) for each in _choices(schema, key)))
    for each in _choices(schema, "allOf"):
        further = types_of(each, root, depth + 1)
        types = (types & further) or types or further
    return types | {"null"} if types and schema.get("nullable") is True else types


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema has without those that it combines or refers to."""
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else _choices(schema, "type")
    if types := frozenset(each for each in listed if isinstance(each, str)):
        return types
    if "const" in schema:
        return _type_names(schema["const"])
    if "properties" in schema or "additionalProperties" in schema:
        return frozenset({"object"})
    if "items" in schema or "prefixItems" in schema:
        return frozenset({"array"})
    return frozenset().union(*map(_type_names, _choices(schema, "enum")))


def properties_of(schema: Any, depth: int = 0, root: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the schemas of arguments by name, those of references and of `allOf` too."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return {}
    root = schema if root is None else root
    found = dict(properties_of(_referred(schema, root), depth + 1, root))
    for part in _choices(schema, "allOf"):
        found.update(properties_of(part, depth + 1, root))
    own = schema.get("properties")
    return {**found, **own} if isinstance(own, Mapping) else found


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """The schema to which `$ref` points, as in `#/$defs/Name`; None if it points nowhere."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _is_choice(text: str, schema: Any) -> bool:
    """Return whether a string is one of the choices of a schema."""
    return isinstance(schema, Mapping) and text in _choices(schema, "enum")


def _choices(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    """The list under a key, an empty one if it is not a list."""
    found = schema.get(key)
    return found if isinstance(found, list | tuple) else ()


def _type_names(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"}) if value.is_integer() else frozenset({"number"})
        case str():
            return frozenset({"string"})
        case list() | tuple():
            return frozenset({"array"})
        case Mapping():
            return frozenset({"object"})
    return frozenset()
