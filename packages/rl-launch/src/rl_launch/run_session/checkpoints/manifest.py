"""The files of a checkpoint with their digests, so that damage is noticed, and the files of the loop's state."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from rl_core.errors import MISSING_FILE, CheckpointDamaged, RunDirectoryError, named
from rl_core.model import SavedFile

_ARRAY = "__array__"
_TUPLE = "__tuple__"


FILE_NAME = "manifest.json"


def write_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write `<name>.json` and, if it has arrays, `<name>.npz`.

    Raises:
        ValueError: If a value is neither JSON nor numpy, naming it.
    """
    arrays: dict[str, np.ndarray] = {}
    plain = _plain(state, name, arrays)
    folder.mkdir(parents=True, exist_ok=True)
    with named(folder / f"{name}.json"):
        (folder / f"{name}.json").write_text(json.dumps(plain))
    if arrays:
        with named(folder / f"{name}.npz"):
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]  # its stub takes the names for options


def read_state(folder: Path, name: str) -> dict[str, Any]:
    """Read the values that `write_state` wrote: dicts, lists, tuples, scalars and arrays as they were."""
    with named(folder / f"{name}.json"):
        plain = json.loads((folder / f"{name}.json").read_text())
    archive = folder / f"{name}.npz"
    try:
        with named(archive), np.load(archive, allow_pickle=False) as arrays:
            return _restored(plain, arrays)
    except FileNotFoundError:
        return _restored(plain, {})


def _plain(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    match value:
        case np.ndarray() | np.generic():
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise ValueError(
                    f"{where} is an array of objects; a checkpoint can contain only arrays of numbers and strings"
                )
            name = f"array_{len(arrays)}"
            arrays[name] = array
            return {_ARRAY: name}
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            odd = [key for key in value if not isinstance(key, str) or key in (_ARRAY, _TUPLE)]
            if odd:
                raise ValueError(f"{where} has the key {odd[0]!r}; keys in a checkpoint must be strings")
            return {key: _plain(item, f"{where}.{key}", arrays) for key, item in value.items()}
        case tuple():
            return {_TUPLE: [_plain(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]}
        case list():
            return [_plain(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        case _:
            raise ValueError(
                f"{where} is a {type(value).__name__}; a checkpoint can contain only JSON values and numpy arrays"
            )


def _restored(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    match value:
        case dict() if _ARRAY in value:
            # a scalar was stored as an array of no dimensions
            return arrays[value[_ARRAY]][()]
        case dict() if _TUPLE in value:
            return tuple(_restored(item, arrays) for item in value[_TUPLE])
        case dict():
            return {key: _restored(item, arrays) for key, item in value.items()}
        case list():
            return [_restored(item, arrays) for item in value]
        case _:
            return value


@dataclass(frozen=True)
class CheckpointManifest:
    """Contents of a checkpoint.

    Args:
        step: Last step before it was saved.
        metrics: Metrics of that step.
        files: Files by relative path, size in bytes and SHA-256; None for a file that was not digested.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        step: int,
        metrics: Mapping[str, float],
        *,
        written: Mapping[str, Iterable[SavedFile]],
        own: Iterable[str] = (),
    ) -> CheckpointManifest:
        """List the files of a checkpoint, and check that all of them are in the folder. Only the driver's own files are
        read.

        Args:
            folder: Folder of the checkpoint.
            step: Last step before it was saved.
            metrics: Metrics of that step.
            written: Files that the ranks report as written, by subfolder.
            own: Relative paths of files that this process wrote, or folders of such; small.

        Raises:
            RunDirectoryError: naming a file that a rank wrote and that is missing or incomplete, and the rank.
        """
        files: dict[str, tuple[int, str | None]] = {}
        for subfolder, theirs in written.items():
            for file in theirs:
                path = folder / subfolder / file.path
                writer = f"{subfolder}/{file.path}, written by rank {file.rank}"
                if (size := _size(path)) is None:
                    raise RunDirectoryError(
                        f"{writer}, is not in {folder}: the node of that rank has a different folder under this name. "
                        "Choose a run_dir that all nodes share."
                    )
                if size != file.size:
                    raise RunDirectoryError(f"{writer}, has {size} of {file.size} bytes in {folder}")
                files[f"{subfolder}/{file.path}"] = file.size, file.sha256
        for path in sorted(each for name in own for each in (folder / name, *(folder / name).rglob("*"))):
            if not path.is_file():
                continue
            sync_path(path)
            files[path.relative_to(folder).as_posix()] = _digest(path)
        return cls(step, dict(metrics), files)

    def write(self, folder: Path) -> None:
        """Write it into the folder it describes, as its last file."""
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        path = folder / FILE_NAME
        with named(path), path.open("w") as file:
            json.dump({"step": self.step, "metrics": dict(self.metrics), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for each in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
            sync_path(each)

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Return the manifest of a checkpoint.

        Raises:
            ValueError: If there is none, or it is damaged.
            OSError: If it could not be read, which does not mean that it is damaged.
        """
        try:
            with named(folder / FILE_NAME):
                data = json.loads((folder / FILE_NAME).read_bytes())
            files = {name: (entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
            return cls(data["step"], data["metrics"], files)
        except (*MISSING_FILE, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{FILE_NAME} is not a manifest: {error}") from None

    def damage(self, folder: Path) -> str:
        """Return the first file that is missing or has another size, in words; empty if there is none. Reads no file:
        contents are compared when they are loaded."""
        for name, (size, _) in self.files.items():
            found = _size(folder / name)
            if found is None:
                return f"{name} is missing"
            if found != size:
                return f"{name} has {found} of {size} bytes"
        return ""

    def files_of(self, subfolder: str) -> tuple[SavedFile, ...]:
        """Return the files below a subfolder, as `rl_core.model.Model.load` takes them."""
        prefix = f"{subfolder}/"
        return tuple(
            SavedFile(name.removeprefix(prefix), size, digest, 0)
            for name, (size, digest) in self.files.items()
            if name.startswith(prefix)
        )

    def verify(self, folder: Path, subfolder: str) -> None:
        """Compare the contents of the files below a subfolder, which this process has written.

        Raises:
            CheckpointDamaged: Naming the first file that differs.
        """
        for file in self.files_of(subfolder):
            path = folder / subfolder / file.path
            if _size(path) is None or _digest(path) != (file.size, file.sha256):
                raise CheckpointDamaged(f"{folder}: {subfolder}/{file.path} has other contents than were saved")


def _size(path: Path) -> int | None:
    """Return the size of a file; None if there is none. `Path.is_file` would hide why it cannot be determined."""
    try:
        facts = path.stat()
    except MISSING_FILE:
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


@contextmanager
def replaced(path: Path, *, aside: Path | None = None) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` once it is complete and on the disk.

    A process that is killed may leave `aside`, by default `NAME.part`, which the next write of the same file replaces.
    """
    aside = aside or path.with_name(f"{path.name}.part")
    with named(path), aside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sync_path(path: Path) -> None:
    """Write a file, or a folder's list of entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> tuple[int, str]:
    with named(path):
        content = path.read_bytes()
    return len(content), hashlib.sha256(content).hexdigest()
