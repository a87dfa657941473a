"""Safetensors files, checked by their headers without the libraries that load them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.config.tree import reason

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_MOST_NAMED = 4


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Args:
        shapes: Shapes of the tensors, by name.
        num_bytes: Number of bytes that the whole file must have.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: int

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read the header alone.

        Raises:
            ValueError: If the file does not start with one; the message begins with the file's name.
        """
        try:
            with path.open("rb") as file:
                start = file.read(_LENGTH_BYTES)
                # the length of the header comes first, in eight bytes
                length = int.from_bytes(start, "little")
                if _LFS_POINTER.startswith(start) and start:
                    raise ValueError(f"{path.name} is a pointer of Git LFS; run `git lfs pull` to get the file itself")
                if len(start) < _LENGTH_BYTES or length > _LONGEST_HEADER:
                    raise ValueError(f"{path.name} is not a safetensors file")
                text = file.read(length)
        except OSError as error:
            raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
        if len(text) < length:
            raise ValueError(f"{path.name} is truncated: it ends within its header")
        try:
            entries: dict[str, Any] = json.loads(text)
            entries.pop("__metadata__", None)
            shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
            places = sorted(tuple(map(int, entry["data_offsets"])) for entry in entries.values())
            ends = [0, *(end for _, end in places)]
            if any(begin != before or end < begin for (begin, end), before in zip(places, ends, strict=False)):
                raise ValueError
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise ValueError(f"{path.name} is not a safetensors file: its header is not valid") from None
        return cls(shapes, _LENGTH_BYTES + length + ends[-1])

    @classmethod
    def checked(cls, path: Path) -> Header:
        """Read the header, and check that the file is as long as it says.

        Raises:
            ValueError: naming the file.
        """
        header = cls.read(path)
        if (size := path.stat().st_size) != header.num_bytes:
            kind = "is truncated" if size < header.num_bytes else "does not match its header"
            raise ValueError(f"{path.name} {kind}: it has {size} of {header.num_bytes} bytes")
        return header


def weight_file_problems(folder: Path) -> Iterator[str]:
    """Damage of the safetensors of a model's folder: files that are missing or truncated, and tensors that the index
    places in files which do not hold them. Contents are not read. None for a folder without safetensors.
    """
    if (folder / INDEX).is_file():
        yield from _index_problems(folder)
    elif (folder / SINGLE).is_file():
        yield from _file_problems(folder / SINGLE)


def _index_problems(folder: Path) -> Iterator[str]:
    try:
        file_of: dict[str, str] = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield f"{INDEX} is not a valid index of weights: {type(error).__name__}: {reason(error)}"
        return
    files = sorted({str(file) for file in file_of.values()})
    if outside := [file for file in files if Path(file).name != file]:
        yield f"{INDEX} lists {_few(outside)}, which {_is(outside)} not in the folder. Download the model again"
        return
    if (folder / SINGLE).is_file() and SINGLE not in files:
        yield (
            f"it has both {SINGLE} and {INDEX}, which does not list that file, so there may be two models. Remove the "
            "outdated one"
        )
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        yield f"{INDEX} lists {_few(missing)}, which {_is(missing)} missing ({len(missing)} of {len(files)} files)"
    for file in files:
        if file in missing:
            continue
        try:
            held = Header.checked(folder / file).shapes
        except ValueError as error:
            yield str(error)
            continue
        absent = sorted(name for name, place in file_of.items() if place == file and name not in held)
        if absent:
            which = "it" if len(absent) == 1 else "them"
            yield f"{INDEX} places {_few(absent)} in {file}, which does not contain {which}"


def _file_problems(path: Path) -> Iterator[str]:
    try:
        Header.checked(path)
    except ValueError as error:
        yield str(error)


def _few(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
