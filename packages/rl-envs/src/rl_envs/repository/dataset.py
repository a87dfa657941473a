"""Tasks on repositories from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rl_core.errors import DataError
from rl_envs.repository.config import RepositoryTasksSettings
from rl_envs.repository.task import FIELDS


def load(settings: Mapping[str, Any], split: str) -> list[dict[str, Any]]:
    """Rows with `messages`, `info` (repository and tests) and `environment`; the file is all of the split.

    Raises:
        DataError: If the file cannot be read, naming the line.
    """
    config = RepositoryTasksSettings.model_validate(dict(settings))
    path = Path(config.path).expanduser().absolute()
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, config.max_rows), 1):
                if line.strip():
                    rows.append(_row(line, path, number))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return rows


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number} is not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("issue"), str) or not row["issue"].strip():
        raise DataError(f"{path}:{number} must be an object with the task in words as `issue`, got {line!r:.60}")
    info = {name: row[name] for name in FIELDS if name in row}
    if isinstance(info.get("repository"), str):
        info["repository"] = str(path.parent / Path(info["repository"]).expanduser())
    return {"messages": [{"role": "user", "content": row["issue"]}], "info": info, "environment": "repository"}
