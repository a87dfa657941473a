"""Programming problems from a file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_envs.code.config import CodeProblemsSettings
from rl_envs.code.schemas import row_of


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Rows with `messages`, `info` (the tests) and `environment`; the file is all of the split.

    Raises:
        DataError: If the file cannot be read, naming the line.
    """
    config = CodeProblemsSettings.model_validate(dict(settings))
    path = Path(config.path)
    rows = []
    for number, line in islice(_lines(path), config.max_rows):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(f"a line must be an object, got {line!r:.60}")
            rows.append(row_of(row, config.format))
        except ValueError as error:  # of JSON, and of the row
            raise DataError(f"{path}:{number}: {error}") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
