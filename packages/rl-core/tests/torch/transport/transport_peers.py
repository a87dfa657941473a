"""Senders and receivers in processes of their own, for the tests of transports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl_core.devices import CPU
from rl_core.torch.transport import open_receiver, open_sender
from rl_core.weights import Manifest, TensorSpec, Transport, TransportKind

KINDS: tuple[TransportKind, ...] = ("ipc", "collective", "disk")
MEETING: tuple[TransportKind, ...] = ("ipc", "collective")
"""Those whose ends work at the same time."""

# forked from a server that has torch loaded: a process then starts in milliseconds
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rl_core.torch.transport"])


def make_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """All dtypes, odd sizes, an empty one, a scalar, one that is not contiguous and one larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "first": torch.randn(33, 7, generator=generator),
        "half": torch.randn(5, 5, generator=generator).to(torch.float16),
        "brain": torch.randn(1001, generator=generator).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.randn((), generator=generator),
        "large": torch.randn(300, 100, generator=generator),
        "mask": torch.randint(0, 2, (13,), generator=generator).bool(),
        "bytes": torch.randint(0, 256, (17,), generator=generator).to(torch.uint8),
        "double": torch.randn(3, 1, 2, generator=generator).double(),
        "transposed": torch.randn(40, 30, generator=generator).t(),
        "long": torch.arange(9),
        "int": torch.arange(11, dtype=torch.int32),
        "last": torch.randn(64, 64, generator=generator),
    }


def manifest_of(tensors: dict[str, torch.Tensor], version: int = 1) -> Manifest:
    return Manifest(version, tuple(TensorSpec(n, tuple(t.shape), str(t.dtype)[6:]) for n, t in tensors.items()))


def transport(kind: TransportKind, folder: Path, num_receivers: int = 1, timeout_s: float = 600.0) -> Transport:
    if kind == "disk":
        return Transport(kind, str(folder), num_receivers, 16 * 1024, timeout_s)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    return Transport(kind, address, num_receivers, 16 * 1024, timeout_s)


class Peer:
    """A process that runs one end of a transfer; `result` is what that returned or raised."""

    def __init__(self, target: Any, *args: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_report, args=(theirs, target, *args), daemon=True)
        self.process.start()
        theirs.close()

    def result(self, timeout_s: float = 300.0) -> Any:
        """Raises EOFError where the process ended without a word."""
        assert self._pipe.poll(timeout_s), "the process did not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _report(pipe: Connection, target: Any, *args: Any) -> None:
    started = time.monotonic()
    try:
        result = target(*args)
    except Exception as error:  # noqa: BLE001 - reported to the test
        result = error
    pipe.send((result, time.monotonic() - started))


def receive(seed: int, transport: Transport, rank: int, fault: str = "") -> Any:
    """Names that did not arrive bit-equal, and the digest."""
    tensors = make_tensors(seed)
    wrong = []
    with open_receiver(manifest_of(tensors), transport, rank, CPU) as receiver:
        for name, tensor in receiver:
            same = tensor.dtype == tensors[name].dtype and _bits(tensor) == _bits(tensors[name])
            wrong += [] if same else [name]
            _fail(fault, name)
    return wrong, receiver.digest


def _bits(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    integers = tensor.contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype)
    return tuple(tensor.shape), integers.numpy().tobytes()


def send(seed: int, transport: Transport, fault: str = "") -> Any:
    """The digest."""
    tensors = make_tensors(seed)
    with open_sender(manifest_of(tensors), transport, CPU) as sender:
        for name, tensor in tensors.items():
            sender.put(name, tensor)
            _fail(fault, name)
        return sender.finish()


def _fail(fault: str, name: str) -> None:
    """Faults happen in the middle of a transfer."""
    if name != "large":
        return
    match fault:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raises":
            raise KeyError("no parameter of that name")
        case "hangs":
            time.sleep(3600)
