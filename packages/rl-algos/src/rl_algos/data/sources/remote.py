"""Files in object stores, copied to the cache before they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from shutil import copyfileobj
from typing import IO, Any, NamedTuple

from rl_algos.data.sources import cache
from rl_core.errors import DataError


class RemoteFile(NamedTuple):
    """A file in an object store.

    Args:
        url: Address as users write it.
        name: Path below the folder that was given; the file's name if a file or a pattern was given.
        path: Path in its file system.
        system: A file system of fsspec.
    """

    url: str
    name: str
    path: str
    system: Any


def is_remote(path: str) -> bool:
    """Return whether a path is the address of an object store, such as `s3://bucket/folder`, and not a local path."""
    return "://" in path


def files(url: str, is_data: Callable[[str], bool]) -> tuple[list[RemoteFile], bool]:
    """Return the files at the address of a file, a folder or a pattern, by their names, and whether it is a folder.

    Args:
        url: Address that `fsspec` can open, such as `s3://bucket/folder` or `s3://bucket/*.jsonl`.
        is_data: True if a file of a folder holds rows, by its name.

    Raises:
        DataError: If the store cannot be read, with its reason.
    """
    # This imports the libraries of stores; local files need none of them.
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
        is_folder = not any(mark in path for mark in "*?[") and system.isdir(path)
        found = sorted(filter(is_data, system.find(path))) if is_folder else sorted(system.glob(path))
    except ImportError as error:
        raise DataError(f"{url!r} needs a library that is not installed: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{url!r} cannot be read: {str(error) or type(error).__name__}") from error
    above = path.rstrip("/") + "/"
    listed = []
    for each in found:
        name = each.removeprefix(above) if is_folder else PurePosixPath(each).name
        listed.append(RemoteFile(system.unstrip_protocol(each), name, each, system))
    return listed, is_folder


def copied(file: RemoteFile) -> Path:
    """Return a copy in the cache, made anew if the file has changed; raise a `DataError` if it cannot be read."""

    def write(out: IO[bytes]) -> None:
        try:
            with file.system.open(file.path, "rb") as source:
                copyfileobj(source, out, 1 << 20)
        except (OSError, ValueError) as error:
            raise DataError(f"{file.url}: cannot be read: {error}") from error

    version = str(file.system.ukey(file.path))
    return cache.stored(f"copied/{cache.digest(file.url, version)}/{PurePosixPath(file.path).name}", write)
