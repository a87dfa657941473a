"""Rows of a dataset from files, the hub or a plugin."""

from __future__ import annotations

import glob
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, overload

from pydantic import ValidationError

from rl_algos import hub
from rl_algos.data.config import DatasetConfig
from rl_core.config import did_you_mean
from rl_core.errors import DataError
from rl_core.plugins import DATASETS, names, plugin, resolve

Row = Mapping[str, Any]


@dataclass(frozen=True)
class FileRows:
    """Rows of one file.

    Args:
        path: as the user wrote it.
        rows: in their order.
        lines: line of each row, from 1, if the file has lines.
    """

    path: Path
    rows: Sequence[Row]
    lines: Sequence[int] = ()

    def place(self, index: int) -> str:
        """The place of a row, for messages."""
        return f"{self.path}, line {self.lines[index]}" if self.lines else f"{self.path}, row {index} (from 0)"


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """Rows of a dataset in their order, each with its place.

    Args:
        rows: all of them.
        place: from the number of a row to its place, for messages: `prompts.jsonl, line 3`.
    """

    rows: Sequence[Row]
    place: Callable[[int], str]

    @classmethod
    def of_files(cls, files: Sequence[FileRows]) -> Rows:
        """The rows of several files, one after another."""
        ends = list(accumulate(len(file.rows) for file in files))

        def place(index: int) -> str:
            which = bisect_right(ends, index)
            return files[which].place(index - (ends[which - 1] if which else 0))

        return cls(list(chain.from_iterable(file.rows for file in files)), place)

    @classmethod
    def named(cls, rows: Sequence[Row], name: str) -> Rows:
        """Rows that are in no file of the user's."""
        return cls(rows, lambda index: f"{name}, row {index} (from 0)")

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]


def load_rows(settings: DatasetConfig, purpose: str) -> Rows:
    """All rows of a dataset, in their order.

    Args:
        purpose: `train` or `validation`; the split if the settings name none.

    Raises:
        DataError: naming file and line, or the dataset, and the remedy.
    """
    if settings.data_path is not None:
        rows = _read_path(settings.data_path, settings.split)
    else:
        load = _load_plugin if settings.dataset_name in names(DATASETS) else _load_hub
        rows = Rows.named(load(settings, purpose), f"{settings.source} ({settings.split or purpose})")
    if not len(rows):
        raise DataError(f"the dataset {settings.source!r} has no rows; check its name and its `split`")
    return rows


def _load_plugin(settings: DatasetConfig, purpose: str) -> Sequence[Row]:
    assert settings.dataset_name is not None
    if settings.subset is not None:
        raise DataError(f"`subset` is for datasets on the hub; {settings.dataset_name!r} is a plugin: use `settings`")
    load = resolve(plugin(DATASETS, settings.dataset_name).load)
    try:
        rows: Sequence[Row] = load(settings.settings, settings.split or purpose)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {'no such setting' if e['type'] == 'extra_forbidden' else e['msg']} "
            f"(got {e['input']!r})"
            for e in error.errors()
        )
        raise DataError(f"settings of the dataset {settings.dataset_name!r}: {problems}") from None
    return rows


def _load_hub(settings: DatasetConfig, purpose: str) -> Sequence[Row]:
    assert settings.dataset_name is not None
    installed, near = ", ".join(names(DATASETS)), did_you_mean(settings.dataset_name, names(DATASETS))
    if settings.settings:
        raise DataError(
            f"`settings` is for installed datasets, and {settings.dataset_name!r} is not one of them: {installed}{near}"
        )
    if near and "/" not in settings.dataset_name:
        raise DataError(
            f"no dataset {settings.dataset_name!r} is installed{near} Installed are {installed}; "
            "one on the hub is named OWNER/NAME"
        )
    if problem := hub.problem("dataset", settings.dataset_name):
        raise DataError(f"the dataset {settings.dataset_name!r} is not an installed one ({installed}){near}, {problem}")
    # imports pandas and pyarrow, which takes seconds; local files do not need it
    import datasets

    split = settings.split or purpose
    try:
        rows: Sequence[Row] = datasets.load_dataset(settings.dataset_name, settings.subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the dataset {settings.dataset_name!r} (split {split!r}) cannot be loaded: "
            f"it is not installed{near}, and the hub says: {str(error).strip()}; "
            "check the name, `split` and `subset`, or give local files in `data_path`"
        ) from error
    return rows


def _read_path(path: str, split: str | None) -> Rows:
    place = Path(path).expanduser()
    if (place / "dataset_dict.json").exists() or (place / "state.json").exists():
        return Rows.named(_read_saved(place, split), f"{place} ({split})" if split else str(place))
    return Rows.of_files([_READERS[file.suffix](file) for file in _files(place, split)])


def _read_saved(folder: Path, split: str | None) -> Sequence[Row]:
    """A folder that `datasets` saved: a dataset, or several by split."""
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, datasets.DatasetDict):
        if split is not None:
            raise DataError(f"{folder} holds one dataset without splits, got split: {split!r}; remove `split`")
        return saved
    if split not in saved:
        raise DataError(f"{folder} has the splits {', '.join(saved)}, got {split!r}; set `split` to one of them")
    return saved[split]


def _files(place: Path, split: str | None) -> list[Path]:
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if file.suffix in _READERS and file.is_file())
        if split is not None:
            files = [file for file in files if file.relative_to(place).as_posix().startswith(split)]
    elif split is not None:
        raise DataError(f"`split` chooses among the files of a folder, and {str(place)!r} is not one; remove `split`")
    else:
        files = [place] if place.is_file() else [Path(file) for file in sorted(glob.glob(str(place), recursive=True))]
    kinds = ", ".join(_READERS)
    if not files:
        chosen = f" whose names start with {split!r}" if split else ""
        raise DataError(f"no data at {str(place)!r}: expected a file, a folder or a pattern with {kinds} files{chosen}")
    foreign = [str(file) for file in files if file.suffix not in _READERS]
    if foreign:
        raise DataError(f"cannot read {foreign[0]!r}: expected {kinds}")
    return files


def read_jsonl(path: Path) -> FileRows:
    """Rows of a JSON Lines file; raises a `DataError` that names file and line if one is not an object."""
    rows: list[Row] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip(b"\r\n"))
            except ValueError as error:
                raise DataError(f"{path}, line {number}: not a JSON object: {_malformed(line, error)}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: a row must be a JSON object, got {type(row).__name__}")
            rows.append(row)
            lines.append(number)
    return FileRows(path, rows, lines)


def _malformed(line: bytes, error: ValueError) -> str:
    """The reason in words, with the column and the remedy if there is a usual one."""
    if not isinstance(error, json.JSONDecodeError):
        return f"it is not text in UTF-8 ({error})" if isinstance(error, UnicodeDecodeError) else str(error)
    what = error.msg.removesuffix(" at")
    remedy = ""
    if "control character" in what:
        remedy = r"; write \t for a tab and \n for a line break in a text"
    elif "property name enclosed in double quotes" in what and b"'" in line:
        remedy = "; JSON has double quotes, as json.dumps writes them"
    return f"{what} at column {error.colno}{remedy}"


def _read_parquet(path: Path) -> FileRows:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from None
    return FileRows(path, rows)


def _read_arrow(path: Path) -> FileRows:
    import pyarrow
    import pyarrow.ipc

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)  # as `datasets` writes
        except pyarrow.ArrowInvalid:
            source.seek(0)
            try:
                reader = pyarrow.ipc.open_file(source)
            except pyarrow.ArrowInvalid as error:
                raise DataError(f"{path}: not an Arrow file: {error}") from None
        rows: list[Row] = reader.read_all().to_pylist()
    return FileRows(path, rows)


_READERS: Mapping[str, Callable[[Path], FileRows]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
