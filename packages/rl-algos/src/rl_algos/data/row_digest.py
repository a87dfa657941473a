"""Digest of the contents of rows, whatever file, hub or plugin they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np


class RowDigest:
    """Digest of rows in their order, added one by one as they are read.

    It depends on values only: rows that move to another file, or to another format that holds the same values, have the
    same digest. It takes far less time than tokenising the rows does.
    """

    def __init__(self) -> None:
        self._whole = blake2b(digest_size=16)

    def add(self, row: Any) -> None:
        """Add the next row."""
        self._whole.update(json.dumps(row, default=_as_json, skipkeys=True).encode())

    def hexdigest(self) -> str:
        """Return the digest of the rows so far."""
        return self._whole.hexdigest()


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):  # such as an image
        return blake2b(value, digest_size=16).hexdigest()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    # the text of any other object may hold its address
    return str(value) if type(value).__module__ in ("datetime", "decimal", "uuid") else type(value).__qualname__
