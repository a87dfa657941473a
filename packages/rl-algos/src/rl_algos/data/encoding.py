"""Rows made into tokens: in processes of their own, and of large datasets kept in the cache."""

from __future__ import annotations

import inspect
import io
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
from typing import IO, Any, Generic, TypeVar

import numpy as np
from jinja2 import TemplateError

from rl_algos.data import cache
from rl_algos.data.stored_rows import from_bytes, storable, to_bytes
from rl_core.errors import DataError

_log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE = 50_000
"""Rows of a dataset from which on it is kept on disk, and not in memory."""

_CHUNK = 2048
"""Rows of a file of the cache."""

_NUMBER_BYTES = 8
"""Bytes of each number after the rows of a file: positions of rows, their number, and a checksum."""

_PROGRESS_S = 10.0
"""Seconds from one line about progress to the next."""

_LIBRARIES = ("jinja2", "numpy", "tokenizers", "transformers")


@storable
@dataclass(frozen=True)
class Failure:
    """Why a row could not be encoded."""

    reason: str


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """Encodes a row, or says why it cannot be."""

    encode: Callable[[Any], T]

    def __call__(self, item: Any) -> T | Failure:
        try:
            return self.encode(item)
        except DataError as error:
            return Failure(str(error))
        except TemplateError as error:
            return Failure(f"the chat template refuses it: {error}")


def encode_in_memory(items: Sequence[Any], encode: Callable[[Any], T], num_workers: int) -> list[T | Failure]:
    """Every item encoded, in their order; in processes if `num_workers` is above 0.

    Args:
        items: Items to encode; picklable if there are workers.
        encode: Picklable if there are workers; raises a `DataError` for an item that it refuses.
        num_workers: Number of processes; 0 to encode in this process.
    """
    attempt = Attempt(encode)
    if not num_workers:
        return list(map(attempt, items))
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(attempt, items, chunksize=256))


def encode_on_disk(
    items: Sequence[Any], encode: Callable[[Any], T], num_workers: int, *, name: str
) -> Sequence[T | Failure]:
    """See `encode_in_memory`; here the results are in files of the cache, and are read on access.

    A file holds some rows, under a name that follows from their content, from `encode` with all that it holds, and from
    the code and the libraries that do it. So rows that were encoded once are not encoded again, and an interrupted run
    continues where it was. Files hold data and no code (`rl_algos.data.stored_rows`), and a damaged one is made again.
    The progress is logged with `name`, the name of the dataset.
    """
    attempt = Attempt(encode)
    work = pickle.dumps(attempt)
    encoder: Any = encode if inspect.isfunction(encode) else type(encode)
    identity = cache.digest(work, _code(encoder))
    progress = _Progress(name, len(items))
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
            paths.append(cache.stored(file, partial(_write, content), is_intact=_is_intact))
            progress.add(_CHUNK)
    return EncodedRows(paths)


class EncodedRows(Sequence[Any]):
    """Encoded rows in files, of which only the positions are in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._positions = [_positions(path) for path in paths]
        self._size = sum(len(positions) - 1 for positions in self._positions)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(index)
        which, row = divmod(int(index) % self._size, _CHUNK)
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
    """The name of each chunk's file, and a function that gives its content; workers are a few chunks ahead."""
    pending: deque[tuple[str, Callable[[], bytes]]] = deque()
    for chunk in chunks:
        name = cache.digest(identity, chunk)
        file = f"encoded/{name[:2]}/{name}"
        if pool is None or cache.found(file) is not None:
            pending.append((file, partial(_encode_chunk, identity, chunk)))  # called if the file cannot be used
        else:
            future: Future[bytes] = pool.submit(_encode_chunk, identity, chunk)
            pending.append((file, future.result))
        if len(pending) > ahead:
            yield pending.popleft()
    yield from pending


def _encode_chunk(identity: str, chunk: bytes) -> bytes:
    """The content of a file: each encoded row, then their positions, their number, and a checksum of all this."""
    attempt = _ATTEMPTS[identity]
    out = io.BytesIO()
    positions = [0]
    for item in pickle.loads(chunk):  # the chunk comes from the process that encodes, not from a file
        out.write(to_bytes(attempt(item)))
        positions.append(out.tell())
    out.write(np.asarray(positions, dtype="<i8").tobytes())
    out.write(_number(len(positions)))
    return out.getvalue() + _number(zlib.crc32(out.getbuffer()))


def _write(content: Callable[[], bytes], file: IO[bytes]) -> None:
    file.write(content())


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "little")


def _is_intact(path: Path) -> bool:
    """Return whether a file is as it was written."""
    content = path.read_bytes()
    return _number(zlib.crc32(content[:-_NUMBER_BYTES])) == content[-_NUMBER_BYTES:]


def _positions(path: Path) -> np.ndarray:
    """int64 `[rows + 1]`: starts of a file's rows, and the end of the last one."""
    with path.open("rb") as file:
        file.seek(-2 * _NUMBER_BYTES, os.SEEK_END)
        count = int.from_bytes(file.read(_NUMBER_BYTES), "little")
        file.seek(-_NUMBER_BYTES * (count + 2), os.SEEK_END)
        return np.frombuffer(file.read(_NUMBER_BYTES * count), dtype="<i8")


_ATTEMPTS: dict[str, Attempt[Any]] = {}
"""The encoder of this process by its identity: it is sent once, as a tokenizer is large."""


def _keep(identity: str, work: bytes) -> None:
    _ATTEMPTS.clear()
    _ATTEMPTS[identity] = pickle.loads(work)


@lru_cache(maxsize=256)
def _opened(path: Path) -> IO[bytes]:
    """A file that stays open, as rows are read one by one; the oldest of many is closed."""
    return path.open("rb")


@once
def _code(encoder: Any) -> str:
    """Changes when the code does that encodes: of this package, of the encoder's own file, of the libraries."""
    package = Path(__file__).parents[1]
    files = sorted({*package.rglob("*.py"), Path(inspect.getfile(encoder))})
    return cache.digest(*(file.read_bytes() for file in files), *map(version, _LIBRARIES))


class _Progress:
    """Says now and then how many rows are done."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._start = self._said = time.monotonic()

    def add(self, count: int) -> None:
        self._done = min(self._done + count, self._total)
        now = time.monotonic()
        if now - self._said >= _PROGRESS_S:
            self._said = now
            left = (now - self._start) / self._done * (self._total - self._done)
            _log.info("%s: %d of %d rows tokenised, %.0f s left", self._name, self._done, self._total, left)
