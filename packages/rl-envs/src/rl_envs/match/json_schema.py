"""JSON schemas, as far as datasets use them (https://json-schema.org/draft/2020-12)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rl_core.environment import UnusableAnswer

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


def satisfies(value: Any, schema: Any) -> bool:
    """Whether a JSON value satisfies a schema.

    Raises:
        UnusableAnswer: if the schema uses a keyword that is not supported, such as `$ref`.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise UnusableAnswer(f"a JSON schema must be an object, got {schema!r:.80}")
    unknown = sorted(set(schema) - _CHECKS.keys() - _NOTES)
    if unknown:
        raise UnusableAnswer(
            f"the keywords {', '.join(unknown)} of a JSON schema are not supported; supported are {', '.join(_CHECKS)}"
        )
    return all(_CHECKS[key](value, rule, schema) for key, rule in schema.items() if key not in _NOTES)


def same_json(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal; true and 1 are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[key], b[key]) for key in a)
    return bool(a == b)


def _type(value: Any, names: Any, _: Any) -> bool:
    wanted = [names] if isinstance(names, str) else names
    if not set(wanted) <= _TYPES.keys():
        raise UnusableAnswer(f"a JSON schema names the type {names!r}; types are {', '.join(_TYPES)}")
    return any(_TYPES[name](value) for name in wanted)


def _properties(value: Any, rules: Any, _: Any) -> bool:
    return not isinstance(value, dict) or all(satisfies(value[key], rules[key]) for key in rules if key in value)


def _additional(value: Any, rule: Any, schema: Any) -> bool:
    others = set(value) - set(schema.get("properties", ())) if isinstance(value, dict) else set()
    return all(satisfies(value[key], rule) for key in others)


def _items(value: Any, rule: Any, schema: Any) -> bool:
    rest = value[len(schema.get("prefixItems", ())) :] if isinstance(value, list) else []
    return all(satisfies(item, rule) for item in rest)


def _prefix(value: Any, rules: Any, _: Any) -> bool:
    return not isinstance(value, list) or all(map(satisfies, value, rules))


def _unique(value: Any, rule: Any, _: Any) -> bool:
    if not rule or not isinstance(value, list):
        return True
    return not any(same_json(a, b) for index, a in enumerate(value) for b in value[:index])


def _multiple(value: Any, step: Any, _: Any) -> bool:
    if not _TYPES["number"](value):
        return True
    return math.isclose(value / step, round(value / step), rel_tol=0, abs_tol=1e-9)


def _bound(kind: str, holds: Callable[[Any, Any], bool], measure: Callable[[Any], Any] = lambda value: value) -> Any:
    """A check of values of one type that compares them, or their length, with the rule."""
    return lambda value, rule, _: not _TYPES[kind](value) or holds(measure(value), rule)


_CHECKS: Mapping[str, Callable[[Any, Any, Any], bool]] = {
    "type": _type,
    "enum": lambda value, options, _: any(same_json(value, option) for option in options),
    "const": lambda value, constant, _: same_json(value, constant),
    "properties": _properties,
    "required": lambda value, keys, _: not isinstance(value, dict) or set(keys) <= value.keys(),
    "additionalProperties": _additional,
    "items": _items,
    "prefixItems": _prefix,
    "uniqueItems": _unique,
    "multipleOf": _multiple,
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
