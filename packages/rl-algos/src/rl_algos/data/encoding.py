"""Rows made into tokens: in separate processes, and of large datasets kept in the cache, as data without code."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import logging
import os
import pickle
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache as once
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import islice, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from rl_algos.data.config import OnFault
from rl_algos.data.rows.lazily import Lazily
from rl_algos.data.sources import cache
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)

LARGE = 50_000
"""A dataset with at least this number of rows is kept on disk, and not in memory."""

_CHUNK = 2048
"""Rows of a file of the cache."""

_NUMBER_BYTES = 8
"""Bytes of each number after the rows of a file: positions of rows, their number, and a checksum."""

_LENGTH_BYTES = 4
"""Bytes of the length of a row's header."""

_PROGRESS_S = 10.0
"""Seconds from one line about progress to the next."""

_SHOWN = 3
"""Number of malformed rows that are listed by their place, with the reason."""

_LIBRARIES = ("jinja2", "numpy", "tokenizers", "transformers")

_KINDS: dict[str, type] = {}
"""Data classes that rows may hold, by name."""


def storable(kind: Kind) -> Kind:
    """Let instances of a data class be parts of an encoded row in the cache; a class decorator.

    Reading a row calls the constructors of such classes and nothing else.
    """
    assert dataclasses.is_dataclass(kind), kind
    assert kind.__name__ not in _KINDS, kind
    _KINDS[kind.__name__] = kind
    return kind


@storable
@dataclass(frozen=True)
class EncodingFailure:
    """Why a row could not be encoded."""

    reason: str


def attempt(encode: Callable[[Any], T], item: Any) -> T | EncodingFailure:
    """Encode a row, or return why it cannot be encoded."""
    try:
        return encode(item)
    except DataError as error:
        return EncodingFailure(str(error))
    except TemplateError as error:
        return EncodingFailure(f"the chat template refuses it: {error}")


def encode_in_memory(items: Sequence[Any], encode: Callable[[Any], T], num_workers: int) -> list[T | EncodingFailure]:
    """Encode every item, in their order; in processes if `num_workers` is above 0.

    Args:
        items: Items to encode; picklable if there are workers.
        encode: Picklable if there are workers; raises a `DataError` for an item that it refuses.
        num_workers: Number of processes; 0 to encode in this process.
    """
    if not num_workers:
        return [attempt(encode, item) for item in items]
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(attempt, encode), items, chunksize=256))


def encode_on_disk(
    items: Sequence[Any], encode: Callable[[Any], T], num_workers: int, *, name: str
) -> Sequence[T | EncodingFailure]:
    """Encode every item as `encode_in_memory` does, with results in files of the cache, which are read on access.

    A file holds some rows, under a name that follows from their content, from `encode` with all that it holds, and from
    the code and the libraries that do it. So rows that were encoded once are not encoded again, and an interrupted run
    continues where it was. Files hold data and no code, and a damaged one is made again. The progress is logged with
    `name`, the name of the dataset.
    """
    work = pickle.dumps(encode)
    encoder: Any = encode if inspect.isfunction(encode) else type(encode)
    identity = cache.digest(work, _code(encoder))
    num_done, begun = 0, time.monotonic()
    logged = begun
    paths: list[Path] = []
    iterator = iter(items)
    chunks = (pickle.dumps(chunk) for chunk in iter(lambda: list(islice(iterator, _CHUNK)), []))
    with ExitStack() as stack:
        pool = None
        _keep(identity, work)
        if num_workers:
            spawn = get_context("spawn")
            pool = ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_keep, initargs=(identity, work))
            stack.enter_context(pool)
        for file, content in _in_order(chunks, identity, pool, ahead=2 * num_workers):

            def write(out: IO[bytes], content: Callable[[], bytes] = content) -> None:
                out.write(content())

            paths.append(cache.stored(file, write, is_intact=_is_intact))
            num_done, now = min(num_done + _CHUNK, len(items)), time.monotonic()
            if now - logged >= _PROGRESS_S:
                logged, left = now, (now - begun) / num_done * (len(items) - num_done)
                _log.info("%s: %d of %d rows tokenised, %.0f s left", name, num_done, len(items), left)
    return EncodedRows(paths)


class EncodedRows(Lazily[Any]):
    """Encoded rows in files. Only their positions are in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._positions = [_positions(path) for path in paths]
        super().__init__(sum(len(positions) - 1 for positions in self._positions), self._read)

    def _read(self, index: int) -> Any:
        which, row = divmod(index, _CHUNK)
        start, end = (int(position) for position in self._positions[which][row : row + 2])
        return from_bytes(os.pread(_opened(self._paths[which]).fileno(), end - start, start))

    def __iter__(self) -> Iterator[Any]:
        for path, positions in zip(self._paths, self._positions, strict=True):
            content = path.read_bytes()
            for start, end in pairwise(positions):
                yield from_bytes(content[start:end])


def _in_order(
    chunks: Iterable[bytes], identity: str, pool: ProcessPoolExecutor | None, *, ahead: int
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each chunk's file, and a function that returns its content; workers are a few chunks ahead."""
    pending: deque[tuple[str, Callable[[], bytes]]] = deque()
    for chunk in chunks:
        name = cache.digest(identity, chunk)
        file = f"encoded/{name[:2]}/{name}"
        if pool is None or cache.found(file) is not None:
            pending.append((file, partial(_encode_chunk, identity, chunk)))  # Called if the file cannot be used.
        else:
            future: Future[bytes] = pool.submit(_encode_chunk, identity, chunk)
            pending.append((file, future.result))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending


def _encode_chunk(identity: str, chunk: bytes) -> bytes:
    """Return the content of a file: each encoded row, their positions, their number, and a checksum of all this."""
    encode = _ENCODERS[identity]
    out = io.BytesIO()
    positions = [0]
    for item in pickle.loads(chunk):  # The chunk comes from the process that encodes, not from a file.
        out.write(to_bytes(attempt(encode, item)))
        positions.append(out.tell())
    out.write(np.asarray(positions, dtype="<i8").tobytes())
    out.write(len(positions).to_bytes(_NUMBER_BYTES, "little"))
    return out.getvalue() + zlib.crc32(out.getbuffer()).to_bytes(_NUMBER_BYTES, "little")


def _is_intact(path: Path) -> bool:
    """Return whether a file is as it was written."""
    content = path.read_bytes()
    return zlib.crc32(content[:-_NUMBER_BYTES]).to_bytes(_NUMBER_BYTES, "little") == content[-_NUMBER_BYTES:]


def _positions(path: Path) -> np.ndarray:
    """Return int64 `[rows + 1]`: starts of a file's rows, and the end of the last one."""
    with path.open("rb") as file:
        file.seek(-2 * _NUMBER_BYTES, os.SEEK_END)
        count = int.from_bytes(file.read(_NUMBER_BYTES), "little")
        file.seek(-_NUMBER_BYTES * (count + 2), os.SEEK_END)
        return np.frombuffer(file.read(_NUMBER_BYTES * count), dtype="<i8")


_ENCODERS: dict[str, Callable[[Any], Any]] = {}
"""The encoder of this process by its identity: it is sent once, because a tokenizer is large."""


def _keep(identity: str, work: bytes) -> None:
    _ENCODERS.clear()
    _ENCODERS[identity] = pickle.loads(work)


@lru_cache(maxsize=256)
def _opened(path: Path) -> IO[bytes]:
    """Open a file, which stays open because rows are read one by one; the oldest of many is closed."""
    return path.open("rb")


@once
def _code(encoder: Any) -> str:
    """Return a digest of the code that encodes: this package, the encoder's file, and the versions of the libraries."""
    package = Path(__file__).parents[1]
    files = sorted({*package.rglob("*.py"), Path(inspect.getfile(encoder))})
    return cache.digest(*(file.read_bytes() for file in files), *map(version, _LIBRARIES))


def to_bytes(row: Any) -> bytes:
    """Return an encoded row as bytes that contain only data: a line of JSON, then arrays.

    Args:
        row: None, a truth value, a number, a string, an array `[n]`, an instance of a `storable` class, or a list or
            tuple of such.
    """
    arrays: list[bytes] = []
    header = json.dumps(_described(row, arrays), separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *arrays])


def from_bytes(content: bytes) -> Any:
    """Return the row that `to_bytes` wrote; no content runs code.

    Raises:
        ValueError: If the bytes are not an encoded row.
    """
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    position = end

    def built(described: Any) -> Any:
        nonlocal position
        if not isinstance(described, list):
            return described
        kind, *rest = described
        if kind == "array":
            dtype, count = np.dtype(rest[0]), rest[1]
            start, position = position, position + count * dtype.itemsize
            return np.frombuffer(content, dtype=dtype, count=count, offset=start).copy()
        items = [built(item) for item in rest]
        if kind in ("list", "tuple"):
            return items if kind == "list" else tuple(items)
        return _KINDS[kind](*items)

    try:
        return built(json.loads(content[_LENGTH_BYTES:end]))
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"not an encoded row: {type(error).__name__}: {error}") from None


def _described(value: Any, arrays: list[bytes]) -> Any:
    """Return the value as JSON: a container or instance is a list that begins with its kind."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.ndarray():
            assert value.ndim == 1, value.shape
            assert not value.dtype.hasobject, value.dtype
            arrays.append(value.tobytes())
            return ["array", value.dtype.str, len(value)]
        case list() | tuple():
            items: Iterable[Any] = value
        case other:
            assert _KINDS.get(type(value).__name__) is type(value), f"{type(value).__name__} is not storable"
            items = (getattr(value, field.name) for field in dataclasses.fields(other))
    return [type(value).__name__, *(_described(item, arrays) for item in items)]


def with_section(message: str, section: str) -> str:
    """Return a message about a row, with the section of the dataset if it contains keys of the section.

    Args:
        message: Message with the names of keys in backticks.
        section: Section of the dataset, such as `data.train`.
    """
    has_keys = any(f"`{key}`" in message for key in ("input_key", "output_key", "columns"))
    return f"{message} (as {section}.KEY=VALUE)" if has_keys else message


class LeftOut:
    """Counts rows of a dataset that cannot be used.

    Args:
        name: Name of the dataset.
        malformed: `error` if such a row ends the run.
        num_rows: Number of rows.
    """

    def __init__(self, name: str, malformed: OnFault, num_rows: int) -> None:
        self._name = name
        self._malformed = malformed
        self._num_rows = num_rows
        self._first: list[str] = []
        self.count = 0

    def found(self, value: Any, place: Callable[[], str]) -> bool:
        """Return whether a row's value is a failure, and count it.

        Raises:
            DataError: with the row's place, if a failure ends the run.
        """
        if not isinstance(value, EncodingFailure):
            return False
        self.count += 1
        if self.count <= _SHOWN:
            self._first.append(f"{place()}: {value.reason}")
        if self._malformed == "error":
            raise DataError(self._first[0])
        return True

    def report(self) -> None:
        """Log how many rows were left out, and the first of them; raise a `DataError` if none is left."""
        if not self.count:
            return
        if self.count == self._num_rows:
            problem = f"all {self.count} rows of the dataset {self._name!r} are malformed"
            raise DataError(f"{problem}, the first {self._first[0]}")
        shown = "\n  ".join(self._first) + (f"\n  ... and {self.count - _SHOWN} more" if self.count > _SHOWN else "")
        problem = "%s: %d of %d rows are malformed; they are excluded (data.malformed: skip)\n  %s"
        _log.warning(problem, self._name, self.count, self._num_rows, shown)
