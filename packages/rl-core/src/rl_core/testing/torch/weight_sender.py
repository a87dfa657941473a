"""A process that sends the weights of a folder, rightly or wrongly."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from rl_core.devices import CPU, Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport import SendingEnd
from rl_core.torch.transport.bucket import Bucket, lay_out
from rl_core.torch.transport.digest import digest
from rl_core.torch.transport.exchange import HeldPart, Holdings
from rl_core.torch.transport.link import SenderLink, root_digest
from rl_core.weights import Manifest, TensorSpec, Transport

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class Fault(NamedTuple):
    """A fault of the sender.

    Args:
        corrupt: Name of a tensor that arrives other than it was.
        die_at: The process ends without a word at the tensor of this name.
        omit: Name of a tensor that it leaves out.
        stop_at: The process stops at the tensor of this name, until `SenderProcess.stopped` continues it.
    """

    corrupt: str = ""
    die_at: str = ""
    omit: str = ""
    stop_at: str = ""


def manifest_of(folder: Path, version: int) -> Manifest:
    """Return the manifest that a policy would send the weights in this folder with."""
    tied = {HEAD: EMBEDDING} if json.loads((folder / "config.json").read_text())["tie_word_embeddings"] else {}
    tensors = load_file(folder / "model.safetensors")
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    return Manifest(version, tuple(spec for spec in specs if spec.name not in tied), tied)


def digest_of(folder: Path, manifest: Manifest, bucket_bytes: int) -> str:
    """Return the digest of the weights as they are in the folder, sent in buckets of this size."""
    tensors = load_file(folder / "model.safetensors")
    digests = []
    for bucket in lay_out(manifest, bucket_bytes).buckets:
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.view(buffer).copy_(tensors[slot.spec.name])
        digests.append(digest(buffer))
    return root_digest(digests)


class Corrupting:
    """A `SenderLink` that changes a tensor after its digest was taken.

    Args:
        link: That carries the buckets.
        name: Name of the tensor.
    """

    def __init__(self, link: SenderLink, name: str) -> None:
        self._link = link
        self.begin, self.finish, self.abort, self.close = link.begin, link.finish, link.abort, link.close
        self._name = name
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def buffer(self, bucket: Bucket) -> torch.Tensor:
        self._buffer = self._link.buffer(bucket)
        return self._buffer

    def send(self, bucket: Bucket) -> int:
        for slot in bucket.slots:
            if slot.spec.name == self._name:
                self._buffer[slot.offset : slot.offset + 1].add_(1)
        return self._link.send(bucket)


class SenderProcess:
    """A process of its own, as a policy is, that sends on demand; restarted if a fault ends it.

    It is a fork of multiprocessing's fork server: call `rl_core.selfcheck.rank_pool.preload` with a module that imports
    torch, and only the server imports it.

    Args:
        device: The policy rank's.
        gpus: Those it sees.
    """

    def __init__(self, device: Device = CPU, gpus: tuple[str, ...] = ()) -> None:
        self._device = device
        self._gpus = gpus
        self._context = multiprocessing.get_context("forkserver")
        self._waiter = ThreadPoolExecutor(1)
        self._process: Any = None

    def send(
        self, folder: Path, manifest: Manifest, transport: Transport, fault: Fault, *, rank: int = 0, num_ranks: int = 1
    ) -> Future[list[str]]:
        """Send; the future holds what the sender's `finish` returned or raised.

        Args:
            folder: Folder of the weights.
            manifest: Manifest of the weights.
            transport: Transfer settings.
            fault: Fault of this sender.
            rank: Rank of the policy that it is, if all ranks send the parts that they hold.
            num_ranks: Number of these ranks; each holds some rows of every tensor.
        """
        if self._process is None or not self._process.is_alive():
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, self._device, self._gpus), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send((folder, manifest, transport, fault, rank, num_ranks))
        return self._waiter.submit(self._answer)

    def _answer(self) -> list[str]:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise WeightSyncError("the sender's process is gone") from None
        if isinstance(answer, Exception):
            raise answer
        digests: list[str] = answer
        return digests

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context that begins when the process has stopped at the tensor of its fault, and continues it."""
        pid = self._process.pid
        # The process is a child of the fork server, so that this one cannot wait for it.
        while Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "T":
            time.sleep(0.05)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(10)
            self._process.kill()
        self._waiter.shutdown()


def _serve(pipe: Connection, device: Device, gpus: tuple[str, ...]) -> None:
    device.claim(gpus)
    end = SendingEnd(device)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            end.close()
            return
        try:
            pipe.send(_send(end, *order))
        except WeightSyncError as error:
            pipe.send(error)


def _send(
    end: SendingEnd, folder: Path, manifest: Manifest, transport: Transport, fault: Fault, rank: int, num_ranks: int
) -> list[str]:
    tensors = load_file(folder / "model.safetensors")
    if manifest.is_held_in_parts:

        def holdings() -> Holdings:
            if fault.die_at:
                os._exit(1)
            return _held_rows(tensors, rank, num_ranks)

        return end.exchange(manifest, transport, rank, num_ranks, holdings).sent_digests
    with end.transfer(manifest, transport) as sender:
        if fault.corrupt:
            sender.links = [Corrupting(link, fault.corrupt) for link in sender.links]
        for spec in manifest.tensors:
            if spec.name == fault.die_at:
                os._exit(1)
            if spec.name == fault.stop_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            if spec.name != fault.omit:
                sender.put(spec.name, tensors[spec.name])
        return sender.finish()


def _held_rows(tensors: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> Holdings:
    """Return the rows of each tensor that a rank holds, as FSDP divides them."""
    holdings: dict[str, list[HeldPart]] = {}
    for name, tensor in tensors.items():
        first = sum(map(len, tensor.tensor_split(num_ranks)[:rank]))
        rows = tensor.tensor_split(num_ranks)[rank]
        box = (first, first + len(rows)), *((0, extent) for extent in tensor.shape[1:])
        holdings[name] = [HeldPart(box, rows)] if len(rows) else []
    return holdings
