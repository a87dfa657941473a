"""Encoded rows as bytes that contain only data: a line of JSON, then arrays."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np

Kind = TypeVar("Kind", bound=type)

_LENGTH_BYTES = 4
_KINDS: dict[str, type] = {}
"""Data classes that rows may hold, by name."""


def storable(kind: Kind) -> Kind:
    """Class decorator: instances of the data class can be parts of an encoded row in the cache.

    Reading a row calls the constructors of such classes and nothing else.
    """
    assert dataclasses.is_dataclass(kind), kind
    assert kind.__name__ not in _KINDS, kind
    _KINDS[kind.__name__] = kind
    return kind


def to_bytes(row: Any) -> bytes:
    """An encoded row as bytes.

    Args:
        row: None, a truth value, a number, a string, an array `[n]`, an instance of a `storable` class, or a list or
            tuple of such.
    """
    arrays: list[bytes] = []
    header = json.dumps(_described(row, arrays), separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *arrays])


def from_bytes(content: bytes) -> Any:
    """Inverse of `to_bytes`; no content runs code.

    Raises:
        ValueError: If the bytes are not an encoded row.
    """
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        return _built(json.loads(content[_LENGTH_BYTES:end]), _Arrays(content, end))
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"not an encoded row: {type(error).__name__}: {error}") from None


class _Arrays:
    """Reads the arrays of a row one after another."""

    def __init__(self, content: bytes, start: int) -> None:
        self._content, self._at = content, start

    def take(self, dtype: str, count: int) -> np.ndarray:
        start, kind = self._at, np.dtype(dtype)
        self._at += count * kind.itemsize
        return np.frombuffer(self._content, dtype=kind, count=count, offset=start).copy()


def _described(value: Any, arrays: list[bytes]) -> Any:
    """The value as JSON: a container or instance is a list that begins with its kind."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray():
            assert value.ndim == 1, value.shape
            assert not value.dtype.hasobject, value.dtype
            arrays.append(value.tobytes())
            return ["array", value.dtype.str, len(value)]
        case list() | tuple():
            return [type(value).__name__, *(_described(item, arrays) for item in value)]
        case _:
            name = type(value).__name__
            assert _KINDS.get(name) is type(value), f"{name} is not storable"
            return [name, *(_described(item, arrays) for item in _fields(value))]


def _fields(value: Any) -> Iterator[Any]:
    return (getattr(value, field.name) for field in dataclasses.fields(value))


def _built(described: Any, arrays: _Arrays) -> Any:
    if not isinstance(described, list):
        return described
    kind, *rest = described
    if kind == "array":
        return arrays.take(*rest)
    items = [_built(item, arrays) for item in rest]
    if kind in ("list", "tuple"):
        return items if kind == "list" else tuple(items)
    return _KINDS[kind](*items)
