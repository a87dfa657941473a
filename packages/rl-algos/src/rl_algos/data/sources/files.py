"""Rows of files, which are read from the file when they are needed."""

from __future__ import annotations

import csv
import json
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from rl_algos.data.rows.lazily import Lazily
from rl_algos.data.rows.messages import without_nulls
from rl_algos.data.sources import cache
from rl_core.errors import DataError

Row = Mapping[str, Any]
LINE_IS_ROW = "one line is one row: write each object on a line by itself, or all of them in an array of a .json file"
_COMPRESSION = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
COMPRESSIONS = tuple(_COMPRESSION)
"""Endings of compressed files."""

_IN_MEMORY_BYTES = 32 << 20
"""A Parquet file of at most this size is held as a table; a larger one is unpacked to the cache and mapped."""
_UNPACKED_BYTES = 1 << 28
"""Any file may grow to this size when it is unpacked, and a large one by `_UNPACKED_TIMES`."""
_UNPACKED_TIMES = 500
_ROW_BYTES = 1 << 28
"""Maximum size of a row, which several large images fit into."""
_ROW_VALUES = 1 << 24
"""Maximum number of values of a row. Nulls and truth values take no bytes in a file, and eight each in a list."""
_LONGEST_FIELD = 1 << 28
"""Maximum number of characters of a CSV field."""
_BATCH = 256
"""Maximum number of rows of a Parquet file that are read at once."""
_DENSE_TIMES = 16
"""How much larger than a Parquet file its largest column usually is."""
_BOM = b"\xef\xbb\xbf"
_MARKS = {b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Byte-order marks of encodings that are not read."""


@dataclass(frozen=True)
class DataRows(Sequence[Row]):
    """Rows of a dataset or of one of its files in their order, each with its place.

    Args:
        rows: All of them; a row is read when it is asked for, which raises a `DataError` if it is malformed.
        place: Function from the number of a row to its place, for messages: `prompts.jsonl, line 3`.
    """

    rows: Sequence[Row]
    place: Callable[[int], str]

    @classmethod
    def of_files(cls, files: Sequence[DataRows]) -> DataRows:
        """Return the rows of several files, one after another."""
        ends = list(accumulate(map(len, files)))

        def find(index: int) -> tuple[DataRows, int]:
            which = bisect_right(ends, index)
            return files[which], index - (ends[which - 1] if which else 0)

        def row(index: int) -> Row:
            file, at = find(index)
            return file.rows[at]

        def place(index: int) -> str:
            file, at = find(index)
            return file.place(at)

        return cls(Lazily(ends[-1] if ends else 0, row), place)

    @classmethod
    def named(cls, rows: Sequence[Row], name: str) -> DataRows:
        """Return rows whose place is a name and their number."""
        return cls(rows, lambda index: f"{name}, row {index} (from 0)")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        try:
            return self.rows[index]
        except DataError as error:
            raise DataError(f"{self.place(index)}: {error}") from None


def _check_row(num_bytes: int, num_values: int = 0) -> None:
    """Refuse a row that no model reads, before it is in memory as Python objects."""
    if num_bytes > _ROW_BYTES or num_values > _ROW_VALUES:
        limits = f"{_ROW_BYTES:,} and {_ROW_VALUES:,}"
        raise DataError(f"the row has {num_bytes:,} bytes and {num_values:,} values; the limits are {limits}")


def _num_values(column: Any) -> int:
    """Return the number of values of an array of Arrow, including the values in lists and structs."""
    from pyarrow import types

    kind = column.type
    if types.is_struct(kind):
        return sum(map(_num_values, column.flatten()))
    if types.is_map(kind):
        return _num_values(column.keys) + _num_values(column.items)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return _num_values(column.flatten()) if is_list else len(column)


def kind_of(name: str) -> str:
    """Return the ending that decides how a file is read, without the ending of a compression; empty if none does."""
    path = Path(name)
    if path.suffix in COMPRESSIONS:
        path = path.with_suffix("")
        return path.suffix if path.suffix in _TEXT else ""
    return path.suffix if path.suffix in _READERS else ""


def read(path: Path, name: str = "") -> DataRows:
    """Read the rows of a file of a known kind.

    Args:
        path: Path of the file; its extensions give the format and the compression.
        name: Name for messages; the path if empty.

    Raises:
        DataError: If the file cannot be read; the message contains its name.
    """
    name = name or str(path)
    kind = kind_of(path.name)
    try:
        plain = _unpacked(path, name) if path.suffix in COMPRESSIONS else path
        if kind in _TEXT:
            with plain.open("rb") as file:
                start = file.read(4)
            if encoding := next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), ""):
                remedy = f"iconv -f {encoding} -t UTF-8 {plain.name} > utf8{plain.suffix}"
                problem = f"the file is encoded as {encoding}, but only UTF-8 is supported; convert it"
                raise DataError(f"{name}: {problem}: {remedy}")
        return _READERS[kind](plain, name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from None


def kinds() -> str:
    """Return the endings of files that can be read, in words."""
    return f"{', '.join(_READERS)}; text also compressed ({', '.join(COMPRESSIONS)})"


def identity(path: Path) -> str:
    """Return a string that changes when the file does."""
    stat = path.stat()
    return f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"


@lru_cache(maxsize=64)
def _opened(path: Path, identity: str) -> IO[bytes]:
    """Open a file, which stays open because rows are read one by one; the oldest of many is closed."""
    return path.open("rb")


def _unpacked(path: Path, name: str) -> Path:
    """Return the content of a compressed file, as a file of the cache."""
    import pyarrow

    def write(file: IO[bytes]) -> None:
        try:
            with pyarrow.input_stream(str(path), compression=_COMPRESSION[path.suffix]) as source:
                while block := source.read(1 << 20):
                    file.write(block)
                    _check_growth(path, name, file.tell())
        except DataError:
            raise
        except (OSError, ValueError) as error:
            raise DataError(f"{name}: not a {path.suffix} file, or damaged: {error}") from None

    return cache.stored(f"unpacked/{cache.digest(identity(path))}{path.with_suffix('').suffix}", write)


def _check_growth(path: Path, name: str, num_bytes: int) -> None:
    """Refuse a small file that holds far more than it seems to, before it fills memory or disk."""
    size = path.stat().st_size
    # Rows that are held in memory take about ten times the size of their text.
    held = 5 if kind_of(path.name) in (".json", ".csv", ".tsv") else 1
    if num_bytes > max(_UNPACKED_BYTES, _UNPACKED_TIMES * size) // held:
        raise DataError(
            f"{name}: too large: it has {size:,} bytes and unpacks to {num_bytes:,} or more, which looks like a "
            "damaged or hostile file. If it is valid, unpack it yourself and pass the result"
        )


def _json_lines(path: Path, name: str) -> DataRows:
    """Read a JSON Lines file. Only the positions of lines are held."""
    state = identity(path)
    starts, lines = array("q"), array("q")
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip() and line != _BOM + b"\n":
                starts.append(position)
                lines.append(number)
            position += len(line)
    starts.append(position)
    # Without blank lines, the number of a line follows from the row, so the numbers are not held.
    numbers = array("q") if len(lines) and lines[-1] == len(lines) else lines

    def row(index: int) -> Row:
        start, end = starts[index], starts[index + 1]
        _check_row(end - start)
        line = os.pread(_opened(path, state).fileno(), end - start, start)
        return _json_row(line.partition(b"\n")[0].removeprefix(_BOM).rstrip(b"\r"))  # Blank lines may follow.

    return DataRows(
        Lazily(len(starts) - 1, row), lambda index: f"{name}, line {numbers[index] if numbers else index + 1}"
    )


def _json_row(line: bytes) -> dict[str, Any]:
    """Return the object of a line; raise a `DataError` with the reason if the line is not one."""
    try:
        row = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not a JSON object: {_reason(line, error)}") from None
    if not isinstance(row, dict):
        raise DataError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


def _json_array(content: bytes, name: str) -> list[Any]:
    """Return the items of an array; raise a `DataError` with the file and the line if it is not one."""
    try:
        rows = json.loads(content, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{name}{where}: not a JSON array: {_reason(b'', error)}") from None
    if not isinstance(rows, list):
        raise DataError(f"{name}: not a JSON array, but {type(rows).__name__}")
    return rows


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} is there twice; remove one")
    return made


def _reason(line: bytes, error: Exception) -> str:
    """Return the reason in words, with the column and the remedy if there is a usual one."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8 ({error})"
    if isinstance(error, RecursionError):
        return "its lists and objects are nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        is_long = "set_int_max_str_digits" in str(error)
        return "an integer has more than 4300 digits; write it as a string" if is_long else str(error)
    problem = error.msg.removesuffix(" at")
    is_cut = line.strip() in (b"{", b"[") or (line and error.pos >= len(line.rstrip()))
    remedy = ""
    if "control character" in problem:
        remedy = r"; write \t for a tab and \n for a line break in a string"
    elif is_cut or problem.startswith("Extra data"):
        remedy = f"; {LINE_IS_ROW}"
    elif "property name enclosed in double quotes" in problem and b"'" in line:
        remedy = "; JSON has double quotes, as json.dumps writes them"
    elif "Illegal trailing comma" in problem or "property name" in problem or problem.startswith("Expecting value"):
        remedy = "; JSON has no trailing comma, no comment and no unquoted text"
    return f"{problem} at column {error.colno}{remedy}"


def _held(rows: Sequence[Any], place: Callable[[int], str]) -> DataRows:
    """Return rows that are in memory as a whole: of a JSON array or a CSV file, with errors in place of some."""

    def row(index: int) -> Row:
        found = rows[index]
        if isinstance(found, DataError):
            raise DataError(str(found))
        if not isinstance(found, dict):
            raise DataError(f"a row must be a JSON object, got {type(found).__name__}")
        return found

    return DataRows(Lazily(len(rows), row), place)


def _of_batches(batches: Sequence[Any], name: str) -> DataRows:
    """Return rows of tables of Arrow's, whose memory may be a mapped file."""
    ends = list(accumulate(batch.num_rows for batch in batches))

    def row(index: int) -> Row:
        which = bisect_right(ends, index)
        table = batches[which].slice(index - (ends[which - 1] if which else 0), 1)
        _check_row(table.nbytes, sum(map(_num_values, table.columns)))
        # Every struct has the fields of all others, with nulls.
        return {name: without_nulls(value) for name, value in table.to_pylist()[0].items()}

    return DataRows.named(Lazily(ends[-1] if ends else 0, row), name)


def _json(path: Path, name: str) -> DataRows:
    """Read an array of rows, one row, or lines of them."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(_BOM).lstrip()
        file.seek(0)
        if start.startswith(b"["):
            rows = _json_array(file.read().removeprefix(_BOM), name)
            return _held(rows, lambda index: f"{name}, item {index} (from 0)")
        lines = _json_lines(path, name)
        if len(lines) < 2:
            return lines
        try:
            _ = lines.rows[0]
            return lines
        except DataError:
            pass
        # These are not lines of rows, so perhaps one row over many lines.
        try:
            return _held([_json_row(file.read().removeprefix(_BOM))], lambda _index: f"{name}, line 1")
        except DataError as error:
            raise DataError(f"{name}: {error}; {LINE_IS_ROW}") from None


def _csv(path: Path, name: str, delimiter: str = ",") -> DataRows:
    rows: list[Any] = []
    lines: list[int] = []
    csv.field_size_limit(_LONGEST_FIELD)  # The default is 128 KiB, for the whole process.
    # Reading leaves a place for characters that are not UTF-8, so that only their row is malformed.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file, strict=True, delimiter=delimiter)
        try:
            columns = list(reader.fieldnames or ())
        except csv.Error as error:
            raise DataError(f"{name}, line 1: not CSV: {error}") from None
        twice = next((column for column, count in Counter(columns).items() if count > 1), None)
        if twice is not None:
            problem = f"there are two columns {twice!r} with different values; rename one of them"
            raise DataError(f"{name}, line 1: {problem}")
        while True:
            first = reader.line_num + 1
            try:
                row: Any = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                row = DataError(f"not CSV: {error}")
            else:
                row = _checked_csv(row, columns)
            rows.append(row)
            lines.append(max(first, 2))
    return _held(rows, lambda index: f"{name}, line {lines[index]}")


def _checked_csv(row: dict[Any, Any], columns: Sequence[str]) -> dict[Any, Any] | DataError:
    if None in row:
        return DataError(f"the row has more fields than the {len(columns)} columns")
    if missing := [name for name, value in row.items() if value is None]:
        return DataError(f"the row ends before the column {missing[0]!r}")
    if any("\udc80" <= character <= "\udcff" for value in row.values() for character in value):
        return DataError("it is not text in UTF-8")
    return row


def _parquet(path: Path, name: str) -> DataRows:
    """Read a small file into memory, or write the batches of a large one to a file of the cache, which is mapped."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
            chunks = [group.column(column) for group in groups for column in range(group.num_columns)]
            # A null or a repeated value may take no byte in the file, and takes four or more in memory.
            num_values = sum(chunk.num_values for chunk in chunks)
            declared = max(sum(group.total_byte_size for group in groups), 4 * num_values)
            _check_growth(path, name, declared)
            # If the file is much smaller than its columns, a value that is stored once may be repeated in each row.
            largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
            is_dense = largest < _DENSE_TIMES * path.stat().st_size
            batch_size = _BATCH if is_dense else max(1, min(_BATCH, _ROW_BYTES // largest))
            if declared <= _IN_MEMORY_BYTES:
                held = _held_batches(file, batch_size)
                if held is not None:
                    return _of_batches(held, name)

            def write(out: IO[bytes]) -> None:
                with pyarrow.ipc.new_file(out, file.schema_arrow) as writer:
                    for batch in file.iter_batches(batch_size=batch_size):
                        writer.write_batch(batch)
                        _check_growth(path, name, out.tell())

            unpacked = cache.stored(f"unpacked/{cache.digest(identity(path))}.arrow", write)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise DataError(f"{name}: not a Parquet file, or damaged: {error}") from None
    return _arrow(unpacked, name)


def _held_batches(file: Any, batch_size: int) -> list[Any] | None:
    """Return all batches; None if they are larger than the metadata of the file, because of repeated values."""
    batches, num_bytes = [], 0
    for batch in file.iter_batches(batch_size=batch_size):
        batches.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > 8 * _IN_MEMORY_BYTES:
            return None
    return batches


def _arrow(path: Path, name: str) -> DataRows:
    """Map a file; batches of a compressed one are in memory."""
    import pyarrow
    import pyarrow.ipc

    def within_bounds(batches: Iterable[Any]) -> list[Any]:
        kept, num_bytes = [], 0
        for batch in batches:
            kept.append(batch)
            num_bytes += batch.nbytes
            _check_growth(path, name, num_bytes)
        return kept

    source = pyarrow.memory_map(str(path))
    try:
        try:
            batches = within_bounds(pyarrow.ipc.open_stream(source))  # `datasets` writes streams.
        except pyarrow.ArrowInvalid:
            source.seek(0)
            file = pyarrow.ipc.open_file(source)
            batches = within_bounds(file.get_batch(index) for index in range(file.num_record_batches))
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise DataError(f"{name}: not an Arrow file, or damaged: {error}") from None
    return _of_batches(batches, name)


_TEXT: Mapping[str, Callable[[Path, str], DataRows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": partial(_csv, delimiter="\t"),
}
_READERS: Mapping[str, Callable[[Path, str], DataRows]] = {**_TEXT, ".parquet": _parquet, ".arrow": _arrow}
