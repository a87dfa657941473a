"""Older versions of the policy that play against it: when each is taken, and how the replicas get it."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rl_core.data.ragged import Ragged
from rl_core.errors import CheckpointDamaged, RunDirectoryError, WeightSyncError
from rl_core.model import SavedFile
from rl_core.plugins import OpponentNeed
from rl_core.ray.calls import gather
from rl_core.rollouts.delivery import Delivery, Taken
from rl_core.weights import Manifest, TensorSpec, Transport, WeightUpdate
from rl_launch.runtime.weight_sync import WeightSync, WrittenWeights
from rl_launch.runtime.weight_transfer import Receiver
from rl_launch.session.checkpoints.manifest import read_state, write_state

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


_log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1200.0
"""Timeout in seconds for an opponent that loads a version from its files."""


def is_due(taken: Sequence[int], version: int, *, update_every: int) -> bool:
    """Return whether an opponent takes a version of the policy.

    Args:
        taken: Versions that it has taken, ascending.
        version: The version that the policy has published.
        update_every: Number of versions from one that is taken to the next.
    """
    return not taken or version - taken[-1] >= update_every


def playing(taken: Sequence[int], *, seed: int) -> int:
    """Return the version that plays: one of those in the pool, drawn anew for each that is taken.

    Args:
        taken: Versions in the pool, ascending; at least one.
        seed: Seed of the draws.
    """
    return int(np.random.default_rng((seed, taken[-1])).choice(taken))


class OpponentSync:
    """Sends the policy's weights to the replicas, and older ones to the opponents next to them.

    A version that an opponent takes is written to the run directory once, as the policy publishes it. Every replica
    loads it from there, and so does one that starts later or belongs to a run that resumes: a checkpoint holds the
    versions of the pools. It is verified as any weight version is: by digests, by the engine's own check and by the
    logprobs of the canary, which are those of the policy when it was written.

    Args:
        needs: Opponents that are versions of the policy.
        sync: Sends the policy's weights.
        versions: The versions of the run.
    """

    trains = True

    def __init__(self, needs: Sequence[OpponentNeed], sync: WeightSync, versions: WrittenVersions) -> None:
        self._needs = list(needs)
        self._sync = sync
        self._versions = versions
        self._taken: dict[str, list[int]] = {need.name: [] for need in needs}
        self._loaded: dict[tuple[Receiver, int], dict[str, int]] = {}
        self._saved: tuple[SavedFile, ...] = ()

    def send(self, update: WeightUpdate, replicas: Sequence[Receiver], *, in_flight: bool = False) -> None:
        """Bring the replicas to the published version and their opponents to the one that plays, verified; for the
        arguments and errors, see `WeightSync.send`.
        """
        self._take(update)
        self._sync.send(update, replicas, in_flight=in_flight)
        self._loaded = {key: self._loaded.get(key, {}) for key in _processes(replicas)}
        for need in self._needs:
            version = playing(self._taken[need.name], seed=need.seed)
            behind = [key for key, versions in self._loaded.items() if versions.get(need.name) != version]
            if behind:
                self._load(need.name, version, [replica for replica, _ in behind])
                for key in behind:
                    self._loaded[key][need.name] = version

    def save(self, path: str, *, wait: bool = True) -> None:
        """Link the versions of the pools into a checkpoint."""
        self._saved = self._versions.save(Path(path), self._taken)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...]:
        """The files of the last save."""
        return self._saved

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Go on with the versions of a checkpoint; the replicas load them as weights are next sent.

        Raises:
            CheckpointDamaged: Naming a file that is missing or differs.
            RunDirectoryError: If it has other opponents.
        """
        taken = self._versions.load(Path(path), files)
        if set(taken) != set(self._taken):
            raise RunDirectoryError(
                f"{path} has versions of the opponents {', '.join(taken)}, but this run has {', '.join(self._taken)}: "
                "it was saved by a different kind of run"
            )
        self._taken = {name: list(versions) for name, versions in taken.items()}
        self._loaded = {}

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Nothing: a version is in the checkpoint itself."""
        return ()

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Nothing."""
        return ()

    def _take(self, update: WeightUpdate) -> None:
        """Write the published version if it is due for an opponent, and drop those that have left all pools."""
        if update.version == 1:
            # a branch that starts at the beginning of its data counts from 1 again, and holds those of another run
            self._taken = {need.name: [] for need in self._needs}
            self._versions.keep(())
        due = list(self._due(update.version))
        if not due:
            return
        if not any(update.version in taken for taken in self._taken.values()):
            self._versions.add(self._sync.write(update, str(self._versions.draft)))
        for need in due:
            self._taken[need.name] = [*self._taken[need.name], update.version][-need.pool :]
        self._versions.keep({version for taken in self._taken.values() for version in taken})

    def _due(self, version: int) -> Iterator[OpponentNeed]:
        for need in self._needs:
            assert need.update_every is not None, "a model that never changes is not sent"
            if is_due(self._taken[need.name], version, update_every=need.update_every):
                yield need

    def _load(self, name: str, version: int, replicas: Sequence[Receiver]) -> None:
        """Bring an opponent to a version on these replicas.

        Raises:
            WeightSyncError: If an engine computes with something else; it then serves nothing.
            WorkerDied, GeneratorError: If a process or an engine ended meanwhile.
        """
        written = self._versions.read(version)
        ranks = [replica.num_ranks for replica in replicas]
        transport = Transport(
            "disk", self._versions.weights(version), num_receivers=sum(ranks), bucket_bytes=written.bucket_bytes
        )
        shared, canary = ray.put(written.manifest), tuple(written.canary)
        origins = [replica.origin(f"opponent {name}, weight version {version}") for replica in replicas]
        firsts = np.cumsum([1, *ranks])[:-1]
        calls = [
            replica.call("opponent_takes_over", name, shared, Delivery(transport, int(first), canary, in_flight=True))
            for replica, first in zip(replicas, firsts, strict=True)
        ]
        taken: list[Taken] = gather(calls, origins, LOAD_TIMEOUT_S)
        for found, origin in zip(taken, origins, strict=True):
            if set(found.digests) != {written.digest}:
                raise WeightSyncError(
                    f"{origin}: received weights with digests {', '.join(found.digests)}; written were {written.digest}"
                )
        noise = max((found.quantisation_noise for found in taken), default=0.0)
        scores = [found.scores for found in taken]
        self._sync.canary.check(version, written.expected, origins, scores, quantisation_noise=noise)
        gather([replica.call("resume_opponent", name) for replica in replicas], origins, LOAD_TIMEOUT_S)
        _log.info("opponent %s plays with weight version %d", name, version)


def _processes(replicas: Sequence[Receiver]) -> list[tuple[Receiver, int]]:
    """Replicas with how often each was started, which tells its processes apart."""
    return [(replica, replica.num_starts) for replica in replicas]
