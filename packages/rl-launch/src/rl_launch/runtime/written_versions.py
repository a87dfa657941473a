"""Weight versions of the policy in the run directory, and in its checkpoints."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_core.data.ragged import Ragged
from rl_core.errors import CheckpointDamaged, WeightSyncError
from rl_core.model import SavedFile
from rl_core.weights import Manifest, TensorSpec
from rl_launch.runtime.weight_sync import WrittenWeights
from rl_launch.session.checkpoints.state_file import read_state, write_state

WEIGHTS = "weights"
"""Folder of a version that engines load."""

_DESCRIPTION = "written"
_LISTED = "versions"


class WrittenVersions:
    """A folder of weight versions, each written once and never changed.

    A checkpoint gets links to the files of its versions, which take no space while the run has them too.

    Args:
        folder: The folder, which all nodes share; emptied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[Path, tuple[int, str]] = {}
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def draft(self) -> Path:
        """Folder into which the policy writes the next version."""
        return self._folder / ".draft"

    def add(self, written: WrittenWeights) -> None:
        """Take the version that was written as a draft.

        Raises:
            WeightSyncError: If it is not here.
        """
        try:
            (drafted,) = (path for path in self.draft.iterdir() if not path.name.startswith("."))
        except (OSError, ValueError):
            raise WeightSyncError(
                f"weight version {written.manifest.version} is not in {self.draft}: the node of the policy has a "
                "different folder under this name. Choose a run_dir that all nodes share"
            ) from None
        target, aside = self._path(written.manifest.version), self._folder / ".adding"
        shutil.rmtree(aside, ignore_errors=True)
        (aside / WEIGHTS).mkdir(parents=True)
        drafted.rename(aside / WEIGHTS / drafted.name)
        write_state(aside, _DESCRIPTION, _described(written))
        aside.rename(target)

    def read(self, version: int) -> WrittenWeights:
        """What was written of a version."""
        return _read(read_state(self._path(version), _DESCRIPTION))

    def weights(self, version: int) -> str:
        """The folder of a version that engines load."""
        return str(self._path(version) / WEIGHTS)

    def keep(self, versions: Collection[int]) -> None:
        """Remove all versions but these."""
        for path in self._folder.glob("version_*"):
            if path not in {self._path(version) for version in versions}:
                shutil.rmtree(path)
                self._digests = {file: found for file, found in self._digests.items() if path not in file.parents}

    def save(self, folder: Path, listed: Mapping[str, Sequence[int]]) -> tuple[SavedFile, ...]:
        """Link versions into a folder of a checkpoint.

        Args:
            folder: The folder.
            listed: The versions, by the name of what needs them.
        """
        saved = []
        for version in sorted({version for versions in listed.values() for version in versions}):
            for path in _files(self._path(version)):
                name = path.relative_to(self._folder)
                _link(path, folder / name)
                saved.append(SavedFile(name.as_posix(), *self._digest(path), rank=0))
        write_state(folder, _LISTED, {name: list(versions) for name, versions in listed.items()})
        path = folder / f"{_LISTED}.json"
        return (*saved, SavedFile(path.name, *_synced_digest(path), rank=0))

    def load(self, folder: Path, files: Sequence[SavedFile]) -> dict[str, list[int]]:
        """Go on with the versions in a folder of a checkpoint; returns what `save` listed.

        Raises:
            CheckpointDamaged: Naming a file that is missing or differs.
        """
        for file in files:
            path = folder / file.path
            if not path.is_file() or digest_of(path) != (file.size, file.sha256):
                raise CheckpointDamaged(f"{folder}: {file.path} has other contents than were saved")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._digests = {}
        for version in folder.glob("version_*"):
            for path in _files(version):
                _link(path, self._folder / path.relative_to(folder))
        listed: dict[str, list[int]] = read_state(folder, _LISTED)
        return listed

    def close(self) -> None:
        """Remove the folder; what checkpoints need is linked into them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"version_{version}"

    def _digest(self, path: Path) -> tuple[int, str]:
        """Size and digest of a file, which is read once."""
        if path not in self._digests:
            self._digests[path] = _synced_digest(path)
        return self._digests[path]


def digest_of(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file, which may be larger than the memory."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _synced_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest_of(path)


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _link(path: Path, target: Path) -> None:
    """Another name of a file, or a copy where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)


def _described(written: WrittenWeights) -> dict[str, Any]:
    return {
        "manifest": asdict(written.manifest),
        "digest": written.digest,
        "bucket_bytes": written.bucket_bytes,
        "canary": {"values": written.canary.values, "offsets": written.canary.offsets},
        "expected": {"values": written.expected.values, "offsets": written.expected.offsets},
    }


def _read(state: Mapping[str, Any]) -> WrittenWeights:
    manifest = state["manifest"]
    tensors = tuple(TensorSpec(each["name"], tuple(each["shape"]), each["dtype"]) for each in manifest["tensors"])
    return WrittenWeights(
        Manifest(**{**manifest, "tensors": tensors}),
        state["digest"],
        state["bucket_bytes"],
        Ragged(state["canary"]["values"], state["canary"]["offsets"]),
        Ragged(state["expected"]["values"], state["expected"]["offsets"]),
    )
