"""A process that sends the weights of a folder, rightly or wrongly."""

from __future__ import annotations

import json
import multiprocessing
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rl_core.devices import CPU, Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport import open_sender
from rl_core.torch.transport.digest import digest
from rl_core.weights import Digests, Manifest, TensorSpec, Transport

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Fault:
    """What the sender does wrong.

    Args:
        corrupt: name of a tensor that arrives other than it was.
        die_at: name of a tensor at which the process ends without a word.
        omit: name of a tensor that it leaves out.
    """

    corrupt: str = ""
    die_at: str = ""
    omit: str = ""


def manifest_of(folder: Path, version: int) -> Manifest:
    """What a policy with the weights in this folder would send."""
    tied = {HEAD: EMBEDDING} if json.loads((folder / "config.json").read_text())["tie_word_embeddings"] else {}
    tensors = load_file(folder / "model.safetensors")
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    return Manifest(version, tuple(spec for spec in specs if spec.name not in tied), tied)


def digests_of(folder: Path, manifest: Manifest) -> Digests:
    """Digests of the weights as they are in the folder."""
    tensors = load_file(folder / "model.safetensors")
    return {spec.name: digest(tensors[spec.name]) for spec in manifest.tensors}


class SenderProcess:
    """A process of its own, as a policy is, that sends on demand; restarted where a fault ends it.

    Args:
        device: the policy rank's.
        gpus: those it sees.
    """

    def __init__(self, device: Device = CPU, gpus: tuple[str, ...] = ()) -> None:
        self._device = device
        self._gpus = gpus
        self._context = multiprocessing.get_context("spawn")
        self._waiter = ThreadPoolExecutor(1)
        self._process: Any = None

    def send(self, folder: Path, manifest: Manifest, transport: Transport, fault: Fault) -> Future[Digests]:
        """Send; the future holds what the sender's `finish` returned or raised."""
        if self._process is None or not self._process.is_alive():
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, self._device, self._gpus), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send((folder, manifest, transport, fault))
        return self._waiter.submit(self._answer)

    def _answer(self) -> Digests:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise WeightSyncError("the sender's process is gone") from None
        if isinstance(answer, Exception):
            raise answer
        digests: Digests = answer
        return digests

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(10)
            self._process.kill()
        self._waiter.shutdown()


def _serve(pipe: Connection, device: Device, gpus: tuple[str, ...]) -> None:
    device.claim(gpus)
    while True:
        try:
            folder, manifest, transport, fault = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_send(folder, manifest, transport, fault, device))
        except WeightSyncError as error:
            pipe.send(error)


def _send(folder: Path, manifest: Manifest, transport: Transport, fault: Fault, device: Device) -> Digests:
    tensors = load_file(folder / "model.safetensors")
    with open_sender(manifest, transport, device) as sender:
        for spec in manifest.tensors:
            tensor = tensors[spec.name]
            if spec.name == fault.die_at:
                os._exit(1)
            if spec.name == fault.omit:
                continue
            sender.put(spec.name, tensor + 1 if spec.name == fault.corrupt else tensor)
        return sender.finish()
