"""Rows of data in a config that was made in Python, as files that the run reads."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from rl_algos.data.config import DatasetConfig
from rl_core.config.tree import KeyPath, format_path
from rl_core.errors import ConfigError
from rl_launch.run_session.directory.row_files import FOLDER, RowFile

_SPOOLED_BYTES = 64 * 2**20
"""Files up to this size are held in memory until the run's folder is known."""
_BATCH = 256
"""Rows of a batch of an Arrow file."""
_KEYS = ("dataset_name", "data_path")
"""Keys of a section that choose its dataset."""


def without_rows(value: Any, path: KeyPath) -> tuple[Any, list[RowFile]]:
    """Take the rows out of a value of a config: each dataset of rows becomes a `RowFile`.

    Rows are in place of a dataset (`data.train`, an entry of a list there, `eval.tasks[0].dataset`) or of its
    `data_path`: a `datasets.Dataset`, a list of dicts, a generator, a function that returns rows, or anything else that
    yields dicts. Rows of a `datasets.Dataset` are stored as Arrow, with their types, and others as JSON Lines.

    Args:
        value: Value of a key, or a whole config.
        path: Key of the value; empty for a whole config.

    Raises:
        ConfigError: If a value cannot be stored; contains key, row and column.
    """
    files: list[RowFile] = []

    def taken(value: Any, path: KeyPath) -> Any:
        if _is_dataset(path) and _is_rows(value, path):
            files.append(_file(value, path))
            return {"data_path": files[-1]}
        if path[-1:] == ("data_path",) and not isinstance(value, str | Path | None):
            files.append(_file(value, path))
            return files[-1]
        match value:
            case Mapping():
                parts = {key: key.split(".") if isinstance(key, str) else [str(key)] for key in value}
                return {key: taken(item, (*path, *parts[key])) for key, item in value.items()}
            case list() | tuple():
                return [taken(item, (*path, index)) for index, item in enumerate(value)]
            case _:
                return value

    return taken(value, path), files


def with_paths(value: Any, run_dir: Path | None) -> Any:
    """Replace each `RowFile` in a value by its path in a run's folder; by its name if the folder is not known."""
    match value:
        case RowFile(name=name):
            return name if run_dir is None else str(run_dir / FOLDER / name)
        case Mapping():
            return {key: with_paths(item, run_dir) for key, item in value.items()}
        case list() | tuple():
            return [with_paths(item, run_dir) for item in value]
        case _:
            return value


def _is_dataset(path: KeyPath) -> bool:
    """Return whether a key is the section of a dataset."""
    match path:
        case ("data", "train" | "validation") | ("data", "train" | "validation", int()):
            return True
    return len(path) == 4 and path[:2] == ("eval", "tasks") and isinstance(path[2], int) and path[3] == "dataset"


def _is_rows(value: Any, path: KeyPath) -> bool:
    """Return whether a value in place of a dataset's section is its rows."""
    if value is None or isinstance(value, str | bytes | Path):
        return False
    if isinstance(value, Mapping):
        return _of_datasets(value, "DatasetDict", "IterableDatasetDict")
    if isinstance(value, list | tuple):
        # a list of sections, or of datasets
        known = DatasetConfig.model_fields.keys()
        mappings = [item for item in value if isinstance(item, Mapping)]
        rows = [item for item in mappings if not (item.keys() & set(_KEYS) or item.keys() <= known)]
        return bool(rows) and (isinstance(path[-1], int) or len(rows) == len(value))
    return True


def _file(value: Any, path: KeyPath) -> RowFile:
    key = format_path(path)
    if _of_datasets(value, "DatasetDict", "IterableDatasetDict"):
        splits = list(value)
        raise ConfigError(
            f"{key}: got a {type(value).__name__} with the splits {', '.join(splits)}; give one of them, such as "
            f"dataset[{splits[0]!r}]"
        )
    library = type(value).__module__.partition(".")[0]
    if library in ("pandas", "polars"):
        raise ConfigError(
            f"{key}: got a {type(value).__name__} of {library}; give datasets.Dataset.from_pandas(frame), or a list of "
            "dicts, one for each row"
        )
    content: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES)  # noqa: SIM115 - the run writes it
    digest = hashlib.sha256()
    # rows of a dataset with a transform are made when they are read
    is_table = _of_datasets(value, "Dataset") and value.format["type"] != "custom"
    num_rows = _write_arrow(value, content, digest) if is_table else _write_lines(value, content, digest, key)
    if not num_rows:
        raise ConfigError(f"{key}: got no rows")
    named = [str(part) for part in path if part not in ("data", "data_path", "dataset")]
    return RowFile(f"{'-'.join(named)}-{digest.hexdigest()[:16]}.{'arrow' if is_table else 'jsonl'}", content)


def _of_datasets(value: Any, *names: str) -> bool:
    """Return whether a value is an object of one of these classes of the library `datasets`, which need not be
    imported."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(value, tuple(getattr(library, name) for name in names))


def _write_arrow(dataset: Any, content: IO[bytes], digest: Any) -> int:
    """Write the rows of a `datasets.Dataset`; returns their number.

    The digest is computed from the values, because the bytes depend on how the rows were made.
    """
    import pyarrow

    writer, num_rows = None, 0
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
        plain = table.replace_schema_metadata(None).combine_chunks()
        writer = writer or pyarrow.ipc.new_stream(content, plain.schema)
        writer.write_table(plain)
        digest.update(repr(plain.to_pylist()).encode())
        num_rows += len(plain)
    if writer is not None:
        writer.close()
    return num_rows


def _write_lines(value: Any, content: IO[bytes], digest: Any, key: str) -> int:
    """Write rows as JSON Lines; returns their number."""
    number = 0
    for number, row in enumerate(_rows(value, key), start=1):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{key}: row {number - 1} (from 0) is a {type(row).__name__}; every row must be a dict of columns"
            )
        plain = {}
        for column, cell in row.items():
            where = f"{key}: row {number - 1} (from 0), column {column!r}"
            if not isinstance(column, str):
                raise ConfigError(f"{where}: the name of a column must be a string")
            plain[column] = _plain(cell, where)
        line = json.dumps(plain).encode() + b"\n"
        content.write(line)
        digest.update(line)
    return number


def _rows(value: Any, key: str) -> Iterator[Any]:
    if isinstance(value, type):
        raise ConfigError(f"{key}: got the class {value.__name__}; give rows, or a function that returns them")
    found = value() if inspect.isroutine(value) else value
    try:
        return iter(found)
    except TypeError:
        raise ConfigError(
            f"{key}: got {found!r:.80}; give a dataset of the library `datasets`, a list of dicts, or a generator of "
            "dicts"
        ) from None


def _plain(value: Any, where: str) -> Any:
    """Return a value of a row as JSON has it."""
    match value:
        case None | bool() | str() | int() | float():
            return value
        case np.generic() | np.ndarray():
            return _plain(value.tolist(), where)
        case list() | tuple():
            return [_plain(item, where) for item in value]
        case Mapping():
            if odd := [key for key in value if not isinstance(key, str)]:
                raise ConfigError(f"{where}: has the key {odd[0]!r}; keys of dicts must be strings")
            return {key: _plain(item, where) for key, item in value.items()}
        case _:
            raise ConfigError(
                f"{where}: a {type(value).__name__} cannot be stored; give text, numbers, lists and dicts of these, or "
                "a datasets.Dataset"
            )
