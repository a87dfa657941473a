"""Plain nested values with numpy arrays, as JSON and npz: reading them executes no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.errors import named

_ARRAY = "__array__"
_TUPLE = "__tuple__"


def write_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write `<name>.json` and, if it has arrays, `<name>.npz`.

    Raises:
        ValueError: If a value is neither JSON nor numpy, naming it.
    """
    arrays: dict[str, np.ndarray] = {}
    plain = _plain(state, name, arrays)
    folder.mkdir(parents=True, exist_ok=True)
    with named(folder / f"{name}.json"):
        (folder / f"{name}.json").write_text(json.dumps(plain))
    if arrays:
        with named(folder / f"{name}.npz"):
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]  # its stub takes the names for options


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Read the values that `write_state` wrote: dicts, lists, tuples, scalars and arrays as they were."""
    with named(folder / f"{name}.json"):
        plain = json.loads((folder / f"{name}.json").read_text())
    archive = folder / f"{name}.npz"
    try:
        with named(archive), np.load(archive, allow_pickle=False) as arrays:
            return _restored(plain, arrays)
    except FileNotFoundError:
        return _restored(plain, {})


def _plain(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    match value:
        case np.ndarray() | np.generic():
            return _stored(np.asarray(value), where, arrays)
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            odd = [key for key in value if not isinstance(key, str) or key in (_ARRAY, _TUPLE)]
            if odd:
                raise ValueError(f"{where} has the key {odd[0]!r}; keys in a checkpoint must be strings")
            return {key: _plain(item, f"{where}.{key}", arrays) for key, item in value.items()}
        case tuple():
            return {_TUPLE: [_plain(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]}
        case list():
            return [_plain(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        case _:
            raise ValueError(
                f"{where} is a {type(value).__name__}; a checkpoint can contain only JSON values and numpy arrays"
            )


def _stored(array: np.ndarray, where: str, arrays: dict[str, np.ndarray]) -> dict[str, str]:
    if array.dtype.hasobject:
        raise ValueError(f"{where} is an array of objects; a checkpoint can contain only arrays of numbers and strings")
    name = f"array_{len(arrays)}"
    arrays[name] = array
    return {_ARRAY: name}


def _restored(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    match value:
        case dict() if _ARRAY in value:
            # a scalar was stored as an array of no dimensions
            return arrays[value[_ARRAY]][()]
        case dict() if _TUPLE in value:
            return tuple(_restored(item, arrays) for item in value[_TUPLE])
        case dict():
            return {key: _restored(item, arrays) for key, item in value.items()}
        case list():
            return [_restored(item, arrays) for item in value]
        case _:
            return value
