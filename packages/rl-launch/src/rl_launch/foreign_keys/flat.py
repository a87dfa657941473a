"""Nested values by dotted keys."""

from __future__ import annotations

from typing import Any


def flattened(values: Any, path: str = "") -> dict[str, Any]:
    """The values at the ends of nested mappings by dotted key; a list is one value, and so is an empty mapping."""
    if not isinstance(values, dict) or (not values and path):
        return {path: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flattened(value, f"{path}.{name}" if path else str(name))
    return found
