"""Errors of files, with the name of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that show that there is no file. All others say nothing about its contents: a later attempt may succeed."""


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Give an error of reading or writing a file the name of the file, which the system leaves out after `open`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def require_readable(path: Path) -> None:
    """Raise the `OSError` of reading a small file, before it is read by what would call it invalid."""
    with named(path):
        path.read_bytes()
