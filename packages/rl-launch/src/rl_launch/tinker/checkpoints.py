"""Checkpoints and samplers: folders of weights with their paths and digests."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from rl_launch.tinker.refusal import RequestRefused, not_found
from rl_launch.tinker.store import Row, Store
from rl_launch.tinker.tenants import Tenants

TRAINING, SAMPLER = "training", "sampler"
_KINDS = {"weights": TRAINING, "sampler_weights": SAMPLER}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,127}")
_SCHEME = "tinker://"
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 86400


class CheckpointPath(NamedTuple):
    """A path such as `tinker://RUN/weights/NAME`.

    Args:
        model: Id of the model, which the client calls a training run.
        folder: `weights` or `sampler_weights`.
        name: Name of the checkpoint.
    """

    model: str
    folder: str
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model}/{self.folder}/{self.name}"

    @property
    def kind(self) -> str:
        """Kind of the checkpoint, as the API names it."""
        return _KINDS[self.folder]

    @classmethod
    def parse(cls, path: str) -> Self:
        """Return the parts of a path.

        Raises:
            RequestRefused: If it is not one.
        """
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in _KINDS or not _NAME.fullmatch(parts[2]):
            problem = (
                f"{path[:200]!r} is not a path such as tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
            )
            raise RequestRefused(problem)
        return cls(*parts)


class Checkpoints:
    """Checkpoints and samplers of all models.

    Args:
        store: Queue.
        tenants: Quotas.
    """

    def __init__(self, store: Store, tenants: Tenants) -> None:
        self._store, self._tenants = store, tenants
        self._verified: set[str] = set()

    def find(self, path: str, tenant: str, *, kind: str | None = None) -> Row:
        """Return a checkpoint of a tenant.

        Args:
            path: Path of the checkpoint.
            tenant: Name of the tenant.
            kind: Kind that it must have; None for any.

        Raises:
            RequestRefused: If it does not exist, or has another kind.
        """
        parsed = CheckpointPath.parse(path)
        found = self._store.checkpoint(path, tenant)
        if found is None:
            raise not_found(f"the checkpoint {path}")
        if kind is not None and parsed.kind != kind:
            raise RequestRefused(f"{path} has only what a sampler needs; load a checkpoint of save_state (weights)")
        return found

    def check_new(self, path: CheckpointPath, tenant: str, *, overwrites: bool) -> None:
        """Check that a checkpoint can be added.

        Raises:
            RequestRefused: If its name cannot be one or is taken, or if the tenant has no storage left.
        """
        if not _NAME.fullmatch(path.name):
            problem = "letters, digits and _ . + = - are allowed, at most 128, and no / in it"
            raise RequestRefused(f"{path.name[:150]!r} cannot be the name of a checkpoint: {problem}")
        if not overwrites and self._store.checkpoint(str(path), tenant) is not None:
            raise RequestRefused(f"{path} exists; choose another name, delete it, or pass overwrite=True")
        self._tenants[tenant].check("storage", self._store.storage(tenant) + 1)

    def add(
        self,
        path: CheckpointPath,
        seq: int,
        tenant: str,
        settings: str,
        write: Callable[[Path], object],
        ttl_s: int | None,
        metadata: Mapping[str, str] | None,
    ) -> None:
        """Write a checkpoint, in place of one with the same path.

        Args:
            path: Path of the checkpoint.
            seq: Number of the request of its model that writes it: what takes the place of another checkpoint has
                another folder, because engines know adapters by their folders.
            tenant: Name of its tenant.
            settings: Settings of its model, as stored.
            write: Writes the files to a new folder.
            ttl_s: Seconds until it is deleted; None for never.
            metadata: Strings of the user.
        """
        check_ttl(ttl_s)
        row = self._store.row("SELECT number FROM models WHERE id = ?", path.model)
        assert row is not None
        relative = Path("checkpoints", str(row["number"]), path.folder, f"{path.name}@{seq}")
        folder = self._store.folder / relative
        with replaced_folder(folder) as new:
            new.mkdir()
            write(new)
        now = time.time()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        before = self._store.row("SELECT folder FROM checkpoints WHERE path = ?", str(path))
        self._store.change(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(str(path), path.model, tenant, path.kind, path.name, str(relative), digest_of(folder / "adapter"), size),
            *(settings, now, None if ttl_s is None else now + ttl_s, json.dumps(metadata)),
        )
        if before is not None and before["folder"] != str(relative):
            shutil.rmtree(self._store.folder / before["folder"], ignore_errors=True)

    def add_sampler_of(
        self, model: str, number: int, tenant: str, seqs: tuple[int, int], write: Callable[[Path], object]
    ) -> str:
        """Export a model for a sampler without a path; returns the id of the sampler.

        Args:
            model: Id of the model.
            number: Number of the model.
            tenant: Name of its tenant.
            seqs: Number of the sampler in its session, and of the request in its model.
            write: Writes the export to a new folder.
        """
        session = model.rpartition(":train:")[0]
        relative = Path("samplers", str(number), str(seqs[1]))
        with replaced_folder(self._store.folder / relative) as new:
            write(new)
        sampler = sampler_id(session, seqs[0])
        self._store.change(
            "INSERT OR REPLACE INTO samplers (id, session, tenant, model, path, folder, digest, is_kept, used) "
            "VALUES (?, ?, ?, ?, NULL, ?, ?, 0, ?)",
            *(sampler, session, tenant, model, str(relative), digest_of(self._store.folder / relative), time.time()),
        )
        return sampler

    def add_sampler(self, session: str, seq: int, tenant: str, path: str | None) -> str:
        """Add a sampler of a checkpoint, or of the base; returns its id. Does nothing if it is there already.

        Raises:
            RequestRefused: If there is no such checkpoint.
        """
        sampler = sampler_id(session, seq)
        found = None if path is None else self.find(path, tenant)
        values = (
            (None, None, None) if found is None else (found["model"], f"{found['folder']}/adapter", found["digest"])
        )
        self._store.change(
            "INSERT OR IGNORE INTO samplers (id, session, tenant, model, path, folder, digest, is_kept, used) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, 1, ?)",
            *(sampler, session, tenant, values[0], path, *values[1:], time.time()),
        )
        return sampler

    def adapter(self, sampler: Row) -> Path | None:
        """Return the folder of a sampler's weights; None for the base.

        Raises:
            RequestRefused: If they are not those that the sampler was made of, which it never samples without.
        """
        if sampler["digest"] is None:
            return None
        folder = self._store.folder / (sampler["folder"] or "gone")
        if sampler["folder"] is None or not folder.is_dir():
            problem = "are not kept any more; save them again, or under a name"
            raise RequestRefused(f"the weights of the sampler {sampler['id']} {problem}")
        if sampler["id"] not in self._verified:
            if digest_of(folder) != sampler["digest"]:
                raise RequestRefused(f"the weights of the sampler {sampler['id']} have been replaced; make a new one")
            self._verified.add(sampler["id"])
        self._store.change("UPDATE samplers SET used = ? WHERE id = ?", time.time(), sampler["id"])
        return folder

    def delete(self, path: str) -> None:
        """Delete a checkpoint and its files."""
        row = self._store.row("SELECT folder FROM checkpoints WHERE path = ?", path)
        self._store.change("DELETE FROM checkpoints WHERE path = ?", path)
        if row is not None:
            shutil.rmtree(self._store.folder / row["folder"], ignore_errors=True)

    def delete_expired(self) -> None:
        """Delete the checkpoints that have expired."""
        for row in self._store.rows("SELECT path FROM checkpoints WHERE expires <= ?", time.time()):
            self.delete(row["path"])

    def drop_unused_samplers(self, max_samplers: int) -> None:
        """Delete the weights of samplers without a path that were not used lately, and of ended models.

        Args:
            max_samplers: Number of samplers of each model that keep their weights.
        """
        query = """
            SELECT s.id, s.folder FROM (
                SELECT id, folder, model, ROW_NUMBER() OVER (PARTITION BY model ORDER BY used DESC) AS place
                FROM samplers WHERE is_kept = 0 AND folder IS NOT NULL) s
            JOIN models m ON m.id = s.model WHERE (s.place > ? OR m.ended = 1)
                AND NOT EXISTS (SELECT 1 FROM requests r WHERE r.scope = s.id AND r.state = 'pending')"""
        for row in self._store.rows(query, max_samplers):
            self._store.change("UPDATE samplers SET folder = NULL WHERE id = ?", row["id"])
            shutil.rmtree(self._store.folder / row["folder"], ignore_errors=True)


def sampler_id(session: str, seq: int) -> str:
    """Return the id of a sampler of a session."""
    return f"{session}:sample:{seq}"


def check_ttl(ttl_s: int | None) -> None:
    """Check the lifetime of a checkpoint.

    Raises:
        RequestRefused: If it is too short or too long.
    """
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise RequestRefused(f"ttl_seconds must be from {MIN_TTL_S} to {MAX_TTL_S}, got {ttl_s}")


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Enter a context with the path of a new folder, which takes the place of `folder` when it is written."""
    new = folder.with_name(f"{folder.name}.new")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)
    yield new
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of the files of a folder, with their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            own = hashlib.file_digest(opened, "sha256").digest()
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + own)
    return digest.hexdigest()


def described(row: Row) -> dict[str, Any]:
    """Return a checkpoint as the API lists it."""
    folder = {kind: name for name, kind in _KINDS.items()}[row["kind"]]
    return {
        "checkpoint_id": f"{folder}/{row['name']}",
        "checkpoint_type": row["kind"],
        "time": iso(row["created"]),
        "tinker_path": row["path"],
        "size_bytes": row["size"],
        "public": False,
        "user_metadata": json.loads(row["metadata"] or "null"),
        "expires_at": None if row["expires"] is None else iso(row["expires"]),
    }


def iso(seconds: float) -> str:
    """Return a time of `time.time` in ISO 8601, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1e6):06d}Z"
