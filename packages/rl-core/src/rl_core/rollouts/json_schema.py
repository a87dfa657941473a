"""JSON schemas, as far as datasets use them (https://json-schema.org/draft/2020-12)."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction
from typing import Any

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
}


def check_schema(schema: Any, where: str = "") -> None:
    """Raise a `ValueError` if `satisfies` cannot check a schema.

    Args:
        schema: A JSON value.
        where: Path of the schema within the whole one, for the message.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema{where} must be an object, got {schema!r:.80}")
    unknown = sorted(set(schema) - _CHECKS.keys() - _NOTES)
    if unknown:
        raise ValueError(
            f"the keywords {', '.join(unknown)} of a JSON schema{where} are not supported; supported are "
            f"{', '.join(_CHECKS)}"
        )
    for keyword in schema.keys() & _RULES.keys():
        wanted, is_valid = _RULES[keyword]
        if not is_valid(schema[keyword]):
            raise ValueError(f"{keyword!r} of a JSON schema{where} must be {wanted}, got {schema[keyword]!r:.80}")
    for keyword in schema.keys() & _SCHEMAS.keys():
        for place, inner in _SCHEMAS[keyword](schema[keyword]):
            check_schema(inner, f" at {keyword}{place}")


def satisfies(value: Any, schema: Any) -> bool:
    """Return whether a JSON value, nested within bounds, satisfies a schema that `check_schema` accepts."""
    if isinstance(schema, bool):
        return schema
    return all(_CHECKS[key](value, rule, schema) for key, rule in schema.items() if key not in _NOTES)


def contradiction(schema: Any) -> str:
    """Return why no JSON value satisfies a schema, as far as that shows at once; empty if one may."""
    if not isinstance(schema, dict):
        return "" if schema else "it is false"
    for keyword in schema.keys() & {"enum", "const"}:
        options = schema["enum"] if keyword == "enum" else [schema["const"]]
        if not any(satisfies(option, schema) for option in options):
            return f"no value of its {keyword} satisfies the other keywords"
    for low, high in _BOUNDS.get(str(schema.get("type")), ()):
        if low in schema and high in schema and schema[low] > schema[high]:
            return f"its {low} {schema[low]} is above its {high} {schema[high]}"
    required = schema.get("required", []) if schema.get("type") == "object" else []
    known = schema.get("properties", {})
    if schema.get("additionalProperties") is False and (unknown := [key for key in required if key not in known]):
        return f"it requires {unknown[0]!r}, which is not one of its properties, and allows no others"
    inner = ((key, contradiction(known[key])) for key in required if key in known)
    return next((f"its property {key!r}: {problem}" for key, problem in inner if problem), "")


def same_json(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal; true and 1 are not."""
    return _key(a) == _key(b)


def _key(value: Any) -> Hashable:
    """Return a hashable value that is equal for equal JSON values only; 1 and 1.0 are equal."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", frozenset((key, _key(item)) for key, item in value.items()))
    return value if value is None or isinstance(value, str) else ("number", value)


def _exact(number: Any) -> Fraction:
    """Return the number that was written, rather than the nearest float: 0.3 is a multiple of 0.1."""
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def _bound(kind: str, holds: Callable[[Any, Any], bool], measure: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a check of values of one type that compares them, or their length, with the rule."""
    return lambda value, rule, _: not _TYPES[kind](value) or holds(measure(value), rule)


_CHECKS: Mapping[str, Callable[[Any, Any, Any], bool]] = {
    "type": lambda value, names, _: any(_TYPES[name](value) for name in ([names] if isinstance(names, str) else names)),
    "enum": lambda value, options, _: any(same_json(value, option) for option in options),
    "const": lambda value, constant, _: same_json(value, constant),
    "properties": lambda value, rules, _: (
        not isinstance(value, dict) or all(satisfies(value[key], rules[key]) for key in rules if key in value)
    ),
    "required": lambda value, keys, _: not isinstance(value, dict) or set(keys) <= value.keys(),
    "additionalProperties": lambda value, rule, schema: (
        not isinstance(value, dict)
        or all(satisfies(value[key], rule) for key in set(value) - set(schema.get("properties", ())))
    ),
    "items": lambda value, rule, schema: (
        not isinstance(value, list)
        or all(satisfies(item, rule) for item in value[len(schema.get("prefixItems", ())) :])
    ),
    "prefixItems": lambda value, rules, _: not isinstance(value, list) or all(map(satisfies, value, rules)),
    "uniqueItems": lambda value, rule, _: (
        not rule or not isinstance(value, list) or len({_key(item) for item in value}) == len(value)
    ),
    "multipleOf": lambda value, step, _: not _TYPES["number"](value) or _exact(value) % _exact(step) == 0,
    "minimum": _bound("number", lambda size, rule: size >= rule),
    "maximum": _bound("number", lambda size, rule: size <= rule),
    "exclusiveMinimum": _bound("number", lambda size, rule: size > rule),
    "exclusiveMaximum": _bound("number", lambda size, rule: size < rule),
    "minLength": _bound("string", lambda size, rule: size >= rule, len),
    "maxLength": _bound("string", lambda size, rule: size <= rule, len),
    "pattern": _bound("string", lambda text, rule: re.search(rule, text) is not None),
    "minItems": _bound("array", lambda size, rule: size >= rule, len),
    "maxItems": _bound("array", lambda size, rule: size <= rule, len),
    "minProperties": _bound("object", lambda size, rule: size >= rule, len),
    "maxProperties": _bound("object", lambda size, rule: size <= rule, len),
    "anyOf": lambda value, rules, _: any(satisfies(value, rule) for rule in rules),
    "allOf": lambda value, rules, _: all(satisfies(value, rule) for rule in rules),
    "oneOf": lambda value, rules, _: sum(satisfies(value, rule) for rule in rules) == 1,
    "not": lambda value, rule, _: not satisfies(value, rule),
}

_NOTES = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples", "format"})
"""Keywords that say nothing about what is valid."""


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except (re.error, RecursionError, OverflowError):
        return False


_BOUNDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(["number", "integer"], (("minimum", "maximum"),)),
    "string": (("minLength", "maxLength"),),
    "array": (("minItems", "maxItems"),),
    "object": (("minProperties", "maxProperties"),),
}
"""Pairs of a lower and an upper bound of a type."""

_NUMBER = ("a number", _TYPES["number"])
_COUNT = ("a whole number of at least 0", lambda value: bool(_TYPES["integer"](value) and value >= 0))
_FLAG = ("true or false", _TYPES["boolean"])
_OBJECT = ("an object", _TYPES["object"])
_LIST = ("a list with at least one schema", lambda value: isinstance(value, list) and bool(value))
_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (
        f"one or several of {', '.join(_TYPES)}",
        lambda names: all(
            isinstance(name, str) and name in _TYPES for name in (names if isinstance(names, list) else [names])
        ),
    ),
    "enum": ("a list", _TYPES["array"]),
    "properties": _OBJECT,
    "required": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
    "uniqueItems": _FLAG,
    "multipleOf": ("a number above 0", lambda value: bool(_TYPES["number"](value) and value > 0)),
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], _NUMBER),
    **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"], _COUNT),
    "pattern": ("a regular expression", _is_pattern),
    **dict.fromkeys(["anyOf", "allOf", "oneOf", "prefixItems"], _LIST),
}
"""Description and check of the value of each keyword that is not a schema itself."""

_SCHEMAS: Mapping[str, Callable[[Any], list[tuple[str, Any]]]] = {
    "properties": lambda rule: [(f".{name}", inner) for name, inner in rule.items()],
    **dict.fromkeys(["additionalProperties", "items", "not"], lambda rule: [("", rule)]),
    **dict.fromkeys(
        ["anyOf", "allOf", "oneOf", "prefixItems"], lambda rule: [(f"[{i}]", r) for i, r in enumerate(rule)]
    ),
}
"""The schemas within the value of a keyword, and their places in it."""
