"""What a checkpoint holds, file by file, so that a truncated or corrupted one is noticed before it is loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FILE_NAME = "manifest.json"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Args:
        step: after which it was saved.
        metrics: of that step.
        files: by relative path, size in bytes and SHA-256.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, step: int, metrics: Mapping[str, float]) -> Manifest:
        """Take stock of a folder, and have every file of it on the disk."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = list(pool.map(_synced_digest, paths))
        names = (path.relative_to(folder).as_posix() for path in paths)
        return cls(step, dict(metrics), dict(zip(names, digests, strict=True)))

    def write(self, folder: Path) -> None:
        """Write it into the folder it describes, as its last file."""
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        path = folder / FILE_NAME
        with path.open("w") as file:
            json.dump({"step": self.step, "metrics": dict(self.metrics), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for each in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
            sync_folder(each)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            ValueError: where there is none, or it cannot be read.
        """
        try:
            data = json.loads((folder / FILE_NAME).read_text())
            files = {name: (entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
            return cls(data["step"], data["metrics"], files)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{FILE_NAME} cannot be read: {error}") from None

    def damage(self, folder: Path) -> str:
        """The first file that is missing or differs, and how; empty where all are whole."""
        for name, (size, _) in self.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = pool.map(lambda name: _digest(folder / name), self.files)
            differing = (name for name, digest in zip(self.files, digests, strict=True) if digest != self.files[name])
            return next((f"{name} has other contents than were saved" for name in differing), "")


def sync_folder(folder: Path) -> None:
    """Have a folder's list of names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _synced_digest(path: Path) -> tuple[int, str]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _digest(path)


def _digest(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return file.tell(), digest.hexdigest()
