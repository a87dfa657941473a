"""Bytes per second of each transport, beside a copy in memory of the same tensors in the same run.

python packages/rl-core/benchmarks/weight_transport.py [MiB] [repeats] [num_receivers]
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import tempfile
import time
from typing import Any

import torch

from rl_core.torch.digest import digest
from rl_core.torch.transport import open_receiver, open_sender, receiver, sender
from rl_core.weights import Manifest, TensorSpec, Transport, TransportKind

KINDS: tuple[TransportKind, ...] = ("ipc", "collective", "disk")
TENSOR_MIB = 8


def specs(num_mib: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{index}", (TENSOR_MIB, 2**18), "float32") for index in range(num_mib // TENSOR_MIB))


def receive(manifest: Manifest, transports: list[Transport], rank: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    targets = {spec.name: torch.zeros(spec.shape, device=device) for spec in manifest.tensors}
    for index, transport in enumerate(transports):
        verify(index < len(transports) // 2)
        with open_receiver(manifest, transport, rank, device) as arriving:
            for name, tensor in arriving:
                targets[name].copy_(tensor)


def verify(verified: bool) -> None:
    """Take digests, or time the transport alone."""
    sender.digest = receiver.digest = digest if verified else lambda _: "unverified"  # type: ignore[attr-defined]


def ways(num_receivers: int, repeats: int, folder: str) -> list[Transport]:
    found = []
    for kind in KINDS:
        for _ in range(repeats):
            with socket.create_server(("127.0.0.1", 0)) as server:
                address = f"127.0.0.1:{server.getsockname()[1]}"
            found.append(Transport(kind, folder if kind == "disk" else address, num_receivers, 64 * 2**20))
    return found


def fastest(run: Any, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main(num_mib: int = 64, repeats: int = 3, num_receivers: int = 1) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    manifest = Manifest(1, specs(num_mib))
    tensors = {spec.name: torch.randn(spec.shape, device=device) for spec in manifest.tensors}
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def copy() -> None:
        for name, tensor in tensors.items():
            targets[name].copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()

    copy()
    copy_s = fastest(copy, repeats)
    digest_s = fastest(lambda: [digest(tensor) for tensor in tensors.values()], repeats)
    print(f"{'copy':20s} {num_bytes / copy_s / 1e9:7.2f} GB/s   1.00 of a copy")
    print(
        f"{'digest':20s} {num_bytes / digest_s / 1e9:7.2f} GB/s {copy_s / digest_s:6.2f} of a copy (taken at both ends)"
    )
    with tempfile.TemporaryDirectory() as folder:
        transports = 2 * ways(num_receivers, repeats, folder)
        context = multiprocessing.get_context("spawn")
        for rank in range(1, num_receivers + 1):
            context.Process(target=receive, args=(manifest, transports, rank), daemon=True).start()
        seconds: dict[str, list[float]] = {}
        for index, transport in enumerate(transports):
            verified = index < len(transports) // 2
            verify(verified)
            with open_sender(manifest, transport, device) as sending:
                started = time.perf_counter()
                for name, tensor in tensors.items():
                    sending.put(name, tensor)
                sending.finish()
                label = f"{transport.kind} {'verified' if verified else 'bare'}"
                seconds.setdefault(label, []).append(time.perf_counter() - started)
    for kind, found in seconds.items():
        print(f"{kind:20s} {num_bytes / min(found) / 1e9:7.2f} GB/s {copy_s / min(found):6.2f} of a copy")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
