"""Older versions of the policy that play against it."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import ray

from rl_core.data.ragged import Ragged
from rl_core.errors import CheckpointDamaged, RunDirectoryError, WeightSyncError
from rl_core.model import SavedFile
from rl_core.plugins import OpponentNeed
from rl_core.ray.calls import gather
from rl_core.rollouts.delivery import Delivery, Taken
from rl_core.weights import Manifest, TensorSpec, Transport, WeightUpdate
from rl_launch.run_session.checkpoints.manifest import read_state, write_state
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.weight_sync import WeightSync, WrittenWeights
from rl_launch.runtime.weight_transfer import started

WEIGHTS = "weights"
"""Folder of a version that engines load."""

_DESCRIPTION = "written"
_LISTED = "versions"

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
    """Return the version that plays: one of the pool, drawn again after each version that is added.

    Args:
        taken: Versions in the pool, ascending; at least one.
        seed: Seed of the draws.
    """
    return int(np.random.default_rng((seed, taken[-1])).choice(taken))


class OpponentSync:
    """Sends the policy's weights to the replicas, and older ones to the opponents next to them.

    A version that an opponent takes is written to the run directory once, as the policy publishes it. Every replica
    loads it from this folder, also a replica that starts later or belongs to a resumed run: a checkpoint has the
    versions of the pools. It is verified like any weight version: by digests, by the engine's own check and by the
    logprobs of the canary, which the policy computed when the version was written.

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
        self._loaded: dict[tuple[Replica, int], dict[str, int]] = {}
        self._saved: tuple[SavedFile, ...] = ()

    def send(self, update: WeightUpdate, replicas: Sequence[Replica], *, in_flight: bool = False) -> None:
        """Bring the replicas to the published version and their opponents to the one that plays, verified; for the
        arguments and errors, see `WeightSync.send`.
        """
        if update.version == 1:
            # A branch that starts at the beginning of its data counts from 1 again, and has another run's versions.
            self._taken = {need.name: [] for need in self._needs}
            self._versions.keep(())
        due = []
        for need in self._needs:
            assert need.update_every is not None, "a model that never changes is not sent"
            if is_due(self._taken[need.name], update.version, update_every=need.update_every):
                due.append(need)
        if due:
            if not any(update.version in taken for taken in self._taken.values()):
                self._versions.add(self._sync.write(update, str(self._versions.draft)))
            for need in due:
                self._taken[need.name] = [*self._taken[need.name], update.version][-need.pool :]
            self._versions.keep({version for taken in self._taken.values() for version in taken})
        self._sync.send(update, replicas, in_flight=in_flight)
        self._loaded = {key: self._loaded.get(key, {}) for key in started(replicas)}
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
        """Return the files of the last save."""
        return self._saved

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Continue with the versions of a checkpoint. The replicas load them when weights are next sent.

        Raises:
            CheckpointDamaged: If a file is missing or differs, with its path.
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
        """Export nothing: a version is in the checkpoint."""
        return ()

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Export nothing."""
        return ()

    def _load(self, name: str, version: int, replicas: Sequence[Replica]) -> None:
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


WeightSender = WeightSync | OpponentSync
"""Sends weights to replicas."""


class WrittenVersions:
    """A folder of weight versions. Each is written once and never changed.

    A checkpoint gets links to the files of its versions. They take no space while the run keeps these versions.

    Args:
        folder: A folder that all nodes share. It is emptied.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: dict[Path, tuple[int, str]] = {}
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def draft(self) -> Path:
        """Folder for the next version, before `add`."""
        return self._folder / ".draft"

    def add(self, written: WrittenWeights) -> None:
        """Add the version in the folder `draft`.

        Raises:
            WeightSyncError: If there is none.
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
        described = {
            "manifest": asdict(written.manifest),
            "digest": written.digest,
            "bucket_bytes": written.bucket_bytes,
            "canary": {"values": written.canary.values, "offsets": written.canary.offsets},
            "expected": {"values": written.expected.values, "offsets": written.expected.offsets},
        }
        write_state(aside, _DESCRIPTION, described)
        aside.rename(target)

    def read(self, version: int) -> WrittenWeights:
        """Return the description of a version."""
        state = read_state(self._path(version), _DESCRIPTION)
        manifest = state["manifest"]
        tensors = tuple(TensorSpec(each["name"], tuple(each["shape"]), each["dtype"]) for each in manifest["tensors"])
        return WrittenWeights(
            Manifest(**{**manifest, "tensors": tensors}),
            state["digest"],
            state["bucket_bytes"],
            Ragged(state["canary"]["values"], state["canary"]["offsets"]),
            Ragged(state["expected"]["values"], state["expected"]["offsets"]),
        )

    def weights(self, version: int) -> str:
        """Return the folder of a version that engines load."""
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
            listed: The versions, by the name of the opponent that needs them.
        """
        saved = []
        for version in sorted({version for versions in listed.values() for version in versions}):
            for path in _files(self._path(version)):
                name = path.relative_to(self._folder)
                _link(path, folder / name)
                if path not in self._digests:
                    self._digests[path] = _synced_digest(path)
                saved.append(SavedFile(name.as_posix(), *self._digests[path], rank=0))
        write_state(folder, _LISTED, {name: list(versions) for name, versions in listed.items()})
        path = folder / f"{_LISTED}.json"
        return (*saved, SavedFile(path.name, *_synced_digest(path), rank=0))

    def load(self, folder: Path, files: Sequence[SavedFile]) -> dict[str, list[int]]:
        """Continue with the versions in a folder of a checkpoint; return the argument `listed` of its `save`.

        Raises:
            CheckpointDamaged: If a file is missing or differs, with its path.
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
        """Remove the folder. Checkpoints keep their links."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, version: int) -> Path:
        return self._folder / f"version_{version}"


def digest_of(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file, which may be larger than the memory."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _synced_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest_of(path)


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _link(path: Path, target: Path) -> None:
    """Link a file, or copy it if the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:
        shutil.copy2(path, target)
