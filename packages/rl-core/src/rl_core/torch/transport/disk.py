"""Transport through a folder that sender and receivers share: safetensors shards and an index, gone when it ends."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import Bucket, fingerprint
from rl_core.torch.transport.deadline import Deadline
from rl_core.weights import Digests, Manifest, Transport

INDEX = "model.safetensors.index.json"
_POLL_S = 0.01
_LAST_WORDS_S = 1.0


class _Note:
    """A file by which one process tells the others that it is there; locked for as long as it lives."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        # under a name that no sweep takes for a note whose writer died: it is not locked yet
        aside = path.with_name(f".aside-{uuid.uuid4().hex}")
        self._file: IO[str] = open(aside, "w")  # noqa: SIM115 - held open: the lock ends with it
        fcntl.flock(self._file, fcntl.LOCK_EX)
        json.dump(content, self._file)
        self._file.flush()
        aside.rename(path)

    def remove(self) -> None:
        """Take the note back."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _read(path: Path) -> dict[str, Any] | None:
    """What a note says, if it is there."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    """Leave a message, whole or not at all."""
    aside = path.with_name(f"{path.name}.aside")
    aside.write_text(json.dumps(content))
    aside.rename(path)


def _is_held(path: Path) -> bool:
    """Whether the note's writer is alive and has not taken it back."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


class _Folder:
    """Names inside the shared folder."""

    def __init__(self, manifest: Manifest, transport: Transport) -> None:
        self.root = Path(transport.address)
        self.version = f"v{manifest.version}"
        self.weights = self.root / self.version
        self.sender = self.root / f".{self.version}.sender"

    def hello(self, rank: int) -> Path:
        return self.root / f".{self.version}.receiver-{rank}"

    def digests(self, token: str) -> Path:
        return self.root / f".{self.version}.digests-{token}"

    def abort(self, token: str) -> Path:
        return self.root / f".{self.version}.abort-{token}"

    def sweep(self) -> None:
        """Remove what a sender that was killed left here; a folder has one sender at a time."""
        for note in self.root.glob(".v*.sender"):
            if not _is_held(note):
                shutil.rmtree(self.root / ((_read(note) or {}).get("aside") or note.name), ignore_errors=True)
                shutil.rmtree(self.root / note.name.removeprefix(".").removesuffix(".sender"), ignore_errors=True)
                note.unlink(missing_ok=True)
        for note in self.root.glob(".v*.receiver-*"):
            if not _is_held(note):
                note.unlink(missing_ok=True)


class DiskSenderLink:
    """Writes a shard per bucket into a folder aside and renames it when all are written and all receivers are there."""

    def __init__(self, manifest: Manifest, layout: list[Bucket], transport: Transport, num_receivers: int) -> None:
        self._folder = _Folder(manifest, transport)
        self._fingerprint = fingerprint(manifest)
        self._timeout_s = transport.timeout_s
        self._ranks = range(1, num_receivers + 1)
        self._num_buckets = len(layout)
        self._layout = layout
        self._folder.root.mkdir(parents=True, exist_ok=True)
        self._folder.sweep()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._receivers = {rank: self._await_receiver(rank) for rank in self._ranks}
        self._aside = self._folder.root / f".{self._folder.version}.{uuid.uuid4().hex}"
        note = {"aside": self._aside.name, "receivers": list(self._receivers.values())}
        self._note = _Note(self._folder.sender, note)
        self._aside.mkdir()

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        if self._buffer.numel() < bucket.num_bytes:
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        return self._buffer

    def send(self, bucket: Bucket) -> None:
        tensors = {slot.spec.name: slot.view(self._buffer) for slot in bucket.slots}
        save_file(tensors, self._aside / self._shard(bucket))

    def finish(self) -> Mapping[int, Digests]:
        self._publish()
        return {rank: self._await_digests(rank, token) for rank, token in self._receivers.items()}

    def abort(self, reason: str) -> None:
        for token in self._receivers.values():
            _write(self._folder.abort(token), {"reason": reason})
        deadline = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < deadline and any(_is_held(self._folder.hello(rank)) for rank in self._receivers):
            time.sleep(_POLL_S)
        for token in self._receivers.values():
            self._folder.abort(token).unlink(missing_ok=True)

    def close(self) -> None:
        self._note.remove()
        shutil.rmtree(self._aside, ignore_errors=True)
        shutil.rmtree(self._folder.weights, ignore_errors=True)
        for token in self._receivers.values():
            self._folder.digests(token).unlink(missing_ok=True)

    def _publish(self) -> None:
        """Write the index, addressed to the receivers that are there, so that none takes an older one for it."""
        weight_map = {slot.spec.name: self._shard(bucket) for bucket in self._layout for slot in bucket.slots}
        total = sum(slot.num_bytes for bucket in self._layout for slot in bucket.slots)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map, "receivers": self._receivers}
        (self._aside / INDEX).write_text(json.dumps(index))
        shutil.rmtree(self._folder.weights, ignore_errors=True)
        self._aside.rename(self._folder.weights)

    def _await_receiver(self, rank: int) -> str:
        phase = f"sender rank 0 in rendezvous, waiting for receiver rank {rank} in {self._folder.root}"
        deadline = Deadline(self._timeout_s, phase)
        path = self._folder.hello(rank)
        while True:
            hello = _read(path)
            if hello is not None and _is_held(path):
                break
            deadline.remaining()
            time.sleep(_POLL_S)
        if hello["manifest"] != self._fingerprint:
            raise WeightSyncError(f"receiver rank {rank} expects another manifest than the sender's")
        return str(hello["token"])

    def _await_digests(self, rank: int, token: str) -> Digests:
        deadline = Deadline(self._timeout_s, f"sender rank 0, waiting for digests of receiver rank {rank}")
        while True:
            alive = _is_held(self._folder.hello(rank))
            digests = _read(self._folder.digests(token))
            if digests is not None:
                return digests
            if not alive:
                raise WeightSyncError(f"lost receiver rank {rank} while it read {self._folder.weights}")
            deadline.remaining()
            time.sleep(_POLL_S)

    def _shard(self, bucket: Bucket) -> str:
        return f"model-{bucket.index + 1:05d}-of-{self._num_buckets:05d}.safetensors"


class DiskReceiverLink:
    """Reads the shards once the folder has its final name."""

    def __init__(
        self, manifest: Manifest, layout: list[Bucket], transport: Transport, rank: int, device: torch.device
    ) -> None:
        self._folder = _Folder(manifest, transport)
        self._device = device
        self._rank = rank
        self._timeout_s = transport.timeout_s
        self._size = max([1, *(bucket.num_bytes for bucket in layout)])
        self._token = uuid.uuid4().hex
        self._folder.root.mkdir(parents=True, exist_ok=True)
        hello = {"token": self._token, "manifest": fingerprint(manifest)}
        self._note = _Note(self._folder.hello(rank), hello)
        self._weight_map: dict[str, str] | None = None

    def receive(self, bucket: Bucket) -> torch.Tensor:
        if self._weight_map is None:
            self._weight_map = self._await_index()
        buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        path = self._folder.weights / self._weight_map[bucket.slots[0].spec.name]
        with safe_open(path, framework="pt") as shard:
            for slot in bucket.slots:
                slot.view(buffer).copy_(shard.get_tensor(slot.spec.name))
        return buffer

    def release(self, bucket: Bucket) -> None:
        del bucket  # every bucket has memory of its own

    def finish(self, digests: Digests) -> None:
        # there is an index to wait for even where there was no tensor
        self._weight_map = self._weight_map or self._await_index()
        _write(self._folder.digests(self._token), dict(digests))

    def abort(self, reason: str) -> None:
        del reason  # the sender sees this receiver's note gone

    def close(self) -> None:
        self._note.remove()

    def _await_index(self) -> dict[str, str]:
        deadline = Deadline(self._timeout_s, f"receiver rank {self._rank}, waiting for {self._folder.weights}")
        while True:
            abort = _read(self._folder.abort(self._token))
            if abort is not None:
                raise WeightSyncError(
                    f"the sender gave up before {self._folder.weights} was complete: {abort['reason']}"
                )
            sender = _read(self._folder.sender)
            lost = sender is not None and self._token in sender["receivers"] and not _is_held(self._folder.sender)
            index = _read(self._folder.weights / INDEX)
            if index is not None and index["receivers"].get(str(self._rank)) == self._token:
                weight_map: dict[str, str] = index["weight_map"]
                return weight_map
            if lost:
                raise WeightSyncError(f"lost the sender before {self._folder.weights} was complete")
            deadline.remaining()
            time.sleep(_POLL_S)
