"""Transport through a folder that sender and receivers share: safetensors shards and an index.

The sender writes a version whole and returns; receivers then read it. Nobody waits for another through files, so a
shared file system needs neither locks nor quick notice of changes. A folder holds one version at a time: the next one
takes its place, and nothing is left once the sender has closed its end. If only the changes of a bucket
travel its shard holds these as one tensor.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_core.errors import WeightSyncError
from rl_core.torch.transport.bucket import CHANGES, Bucket, Layout, lay_out
from rl_core.torch.transport.channel import Deadline
from rl_core.torch.transport.link import compare, root_digest
from rl_core.weights import Manifest, Transport

INDEX = "model.safetensors.index.json"
_POLL_S = 0.02


class DiskSenderLink:
    """Writes a shard per bucket into a folder aside and renames it when all are written."""

    def __init__(self, transport: Transport) -> None:
        self._root = Path(transport.address)
        self._timeout_s = transport.timeout_s
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def begin(self, layout: Layout) -> Layout:
        self._layout = layout
        self._aside = self._root / f".{layout.fingerprint}"
        with _failures("sender rank 0 could not write", self._root):
            # A folder has one sender: this is the version before, or files of a sender that was killed.
            for path in self._root.iterdir() if self._root.exists() else ():
                shutil.rmtree(path)
            self._aside.mkdir(parents=True)
        if self._buffer.numel() < layout.capacity:
            self._buffer = torch.empty(layout.capacity, dtype=torch.uint8)
        return layout

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        return self._buffer

    def send(self, bucket: Bucket) -> int:
        path = self._aside / _shard(bucket, self._layout)
        # raises if the transfer was interrupted
        Deadline(self._timeout_s, f"sender rank 0, writing {path}").remaining()
        with _failures("sender rank 0 could not write", path):
            save_file({slot.spec.name: slot.view(self._buffer) for slot in bucket.slots}, path)
        return bucket.num_bytes

    def finish(self, digests: Sequence[str]) -> None:
        shards = {
            slot.spec.name: _shard(bucket, self._layout) for bucket in self._layout.buckets for slot in bucket.slots
        }
        total = sum(slot.num_bytes for bucket in self._layout.buckets for slot in bucket.slots)
        index = {"metadata": {"total_size": total}, "weight_map": shards, "digests": list(digests)}
        with _failures("sender rank 0 could not write", self._aside):
            (self._aside / INDEX).write_text(json.dumps(index))
            self._aside.rename(self._root / self._layout.fingerprint)

    def abort(self, reason: str) -> None:
        del reason  # Receivers do not begin before the sender is done.

    def close(self) -> None:
        """Remove the folder and the version in it."""
        shutil.rmtree(self._root, ignore_errors=True)


class DiskReceiverLink:
    """Reads the shards once the folder has its final name."""

    def __init__(self, transport: Transport, rank: int, device: torch.device) -> None:
        self._root = Path(transport.address)
        self._rank = rank
        self._device = device
        self._timeout_s = transport.timeout_s
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def begin(self, layout: Layout) -> Layout:
        self._layout = layout
        self._folder = self._root / layout.fingerprint
        deadline = Deadline(self._timeout_s, f"receiver rank {self._rank}, waiting for {self._folder}")
        # A file system may show the index to this node later than to the sender's.
        while True:
            try:
                self._index: dict[str, Any] = json.loads((self._folder / INDEX).read_text())
                break
            except FileNotFoundError:
                deadline.remaining()
                time.sleep(_POLL_S)
        if self._buffer.numel() < layout.capacity:
            self._buffer = torch.empty(layout.capacity, dtype=torch.uint8, device=self._device)
        return layout

    def receive(self, bucket: Bucket) -> torch.Tensor:
        path = self._folder / _shard(bucket, self._layout)
        with _failures(f"receiver rank {self._rank} could not read", path), safe_open(path, framework="pt") as shard:
            if CHANGES in shard.keys():  # noqa: SIM118 - not a mapping
                changes = shard.get_tensor(CHANGES)
                return self._buffer[: len(changes)].copy_(changes)
            for slot in bucket.slots:
                slot.view(self._buffer).copy_(shard.get_tensor(slot.spec.name))
        bucket.clear_gaps(self._buffer)
        return self._buffer[: bucket.num_bytes]

    def release(self, bucket: Bucket) -> None:
        """Do nothing: the next copy into the buffer follows in the same stream."""

    def finish(self, digests: Sequence[str]) -> str:
        compare(self._layout, self._index["digests"], digests, f"receiver rank {self._rank}")
        return root_digest(digests, self._layout.parts)

    def abort(self, reason: str) -> None:
        del reason  # The sender does not wait.

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)


def version_folder(manifest: Manifest, transport: Transport) -> Path:
    """Return the folder with the files of a version that was written whole: `*.safetensors` and an index, as
    transformers and engines load them."""
    return Path(transport.address) / lay_out(manifest, transport.bucket_bytes).fingerprint


def _shard(bucket: Bucket, layout: Layout) -> str:
    return f"model-{bucket.index + 1:05d}-of-{len(layout.buckets):05d}.safetensors"


@contextmanager
def _failures(what: str, path: Path) -> Iterator[None]:
    """Name the file that could not be read or written."""
    try:
        yield
    # safetensors raises RuntimeError for a file that it cannot open
    except (OSError, RuntimeError, SafetensorError) as error:
        raise WeightSyncError(f"{what} {path}: {error}") from error
