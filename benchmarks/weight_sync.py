"""Bytes per second of a weight transfer between two processes, beside a plain copy in memory of the same tensors.

    python benchmarks/weight_sync.py [MB:TENSORS ...] [--adapter DIM | --changes SHARE | --ranks N | --exchange N]

Needs rl-core with its extra `torch`; runs on a GPU if there is one, else on the CPU. A transfer is timed from its
beginning to the last acknowledged digest, as in every step of a run: tensors are copied into buckets and out of them
again, and digests taken at both ends. The first, in which the ends connect and make their buffers, does not count.
Through files, which the sender writes before they are read, it lasts until the receiver has read them.

With `--adapter` the tensors are square matrices with an adapter each, and a transfer of the matrices, once the adapters
are merged into them, is compared with one of the adapters' factors alone (`policy.generation.lora_sync`).

With `--changes` the tensors are bfloat16, of which a share of the values changes before each transfer, and transfers of
all weights are compared with those of what has changed (`policy.generation.weight_sync_encoding`).

With `--ranks` the tensors are square matrices for N receivers, as the ranks of a tensor-parallel engine are, and a
transfer of which each is sent the rows that it keeps is compared with one in which each is sent everything.

With `--exchange` the tensors are square bfloat16 matrices, whose rows are divided over N ranks of a policy, each of
which fills buckets with some columns for its receiver: after it has gathered whole tensors, or by an exchange of pieces
(`policy.generation.weight_sync_encoding: parts`), in turn. Both are timed without the hop to the receiver.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import get_args

import torch
import torch.distributed as dist
from measurement import seconds, surroundings, table

from rl_core.devices import CPU, CUDA, Device
from rl_core.torch.transport import ReceivingEnd, SendingEnd
from rl_core.torch.transport.bucket import Parts, Region, lay_out
from rl_core.torch.transport.digest import digest
from rl_core.torch.transport.exchange import Exchange, HeldPart, planned
from rl_core.weights import Manifest, TensorSpec, Transport, TransportKind

CASES = ("3:64", "100:12", "1000:120")
MEGABYTE = 10**6


@dataclass(frozen=True)
class Case:
    """Equal float32 tensors to send."""

    megabytes: int
    num_tensors: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """`MB:TENSORS`."""
        megabytes, _, num_tensors = text.partition(":")
        if not (megabytes.isdigit() and num_tensors.isdigit() and int(megabytes) and int(num_tensors)):
            raise argparse.ArgumentTypeError(f"got {text!r}; write MB:TENSORS, such as 100:12")
        return cls(int(megabytes), int(num_tensors))

    def manifest(self) -> Manifest:
        """The manifest of the tensors."""
        shape = (self.megabytes * MEGABYTE // 4 // self.num_tensors,)
        return Manifest(1, tuple(TensorSpec(f"t{index}", shape, "float32") for index in range(self.num_tensors)))

    @property
    def width(self) -> int:
        """Rows and columns of the matrices, if the tensors are square."""
        return math.isqrt(self.megabytes * MEGABYTE // 4 // self.num_tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", type=Case.parse, metavar="MB:TENSORS", help=f"(default: {' '.join(CASES)})")
    parser.add_argument("--repeats", type=int, default=5, help="transfers, of which the best counts (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in either process (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: 3:64 and 50:6, twice")
    parser.add_argument("--adapter", type=int, metavar="DIM", help="compare with adapters of this dim, sent alone")
    parser.add_argument("--changes", type=float, metavar="SHARE", help="compare with changes, of this share, alone")
    parser.add_argument("--exchange", type=int, metavar="N", help="compare N ranks that gather with N that exchange")
    parser.add_argument("--ranks", type=int, metavar="N", help="compare with N receivers that keep some rows each")
    chosen = parser.parse_args()
    cases, repeats = chosen.cases or list(map(Case.parse, CASES)), chosen.repeats
    if chosen.quick:
        cases, repeats = [Case(3, 64), Case(50, 6)], 2
    torch.set_num_threads(chosen.threads)
    device = CUDA if torch.cuda.is_available() else CPU
    print(f"{surroundings('rl-core', 'torch')}; {device.name}, {chosen.threads} threads, best of {repeats}\n")
    for case in cases:
        print(f"{case.megabytes} MB in {case.num_tensors} tensors\n")
        if chosen.adapter:
            print(compared(case, chosen.adapter, device, repeats, chosen.threads))
        elif chosen.ranks:
            print(in_parts(case, chosen.ranks, device, repeats, chosen.threads))
        elif chosen.exchange:
            print(exchanged(case, chosen.exchange, repeats, chosen.threads))
        elif chosen.changes is not None:
            print(with_changes(case, chosen.changes, device, repeats, chosen.threads))
        else:
            print(measured(case, device, repeats, chosen.threads))
        print()


def measured(case: Case, device: Device, repeats: int, threads: int) -> str:
    """The table of one case."""
    manifest = case.manifest()
    tensors = {spec.name: torch.randn(spec.shape, device=device.torch_device) for spec in manifest.tensors}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    taken = {
        "memory copy": best(lambda: copy(tensors.items(), targets), device, repeats),
        "digests, at one end": best(lambda: [digest(tensor) for tensor in tensors.values()], device, repeats),
    }
    for kind in get_args(TransportKind):
        taken[kind], _ = transfer(kind, manifest, tensors, device, repeats, threads)
    copied = taken["memory copy"]
    rows = [
        (name, seconds(took), f"{num_bytes / took / 1e9:.2f}", f"{copied / took:.2f}") for name, took in taken.items()
    ]
    return table(["", "s", "GB/s", "of a copy's speed"], rows)


def compared(case: Case, dim: int, device: Device, repeats: int, threads: int) -> str:
    """The table of one case with adapters, merged and alone."""
    width, place = case.width, device.torch_device
    weights = {f"t{index}.weight": torch.randn(width, width, device=place) for index in range(case.num_tensors)}
    factors: dict[str, torch.Tensor] = {}
    for index in range(case.num_tensors):
        factors[f"t{index}.lora_A.weight"] = torch.randn(dim, width, device=place)
        factors[f"t{index}.lora_B.weight"] = torch.randn(width, dim, device=place)
    downs, ups = list(factors.values())[::2], list(factors.values())[1::2]

    def merge() -> list[torch.Tensor]:
        return [weight + up @ down for weight, up, down in zip(weights.values(), ups, downs, strict=True)]

    merging = best(merge, device, repeats)
    rows = []
    for kind in get_args(TransportKind):
        for name, tensors, before in (("merged", weights, merging), ("adapter alone", factors, 0.0)):
            specs = tuple(TensorSpec(key, tuple(tensor.shape), "float32") for key, tensor in tensors.items())
            manifest = Manifest(1, specs)
            took, num_bytes = transfer(kind, manifest, tensors, device, repeats, threads)
            rows.append((kind, name, f"{num_bytes / MEGABYTE:.2f}", f"{1000 * (before + took):.1f}"))
    return table(["", "", "MB", "ms, with merging"], rows)


def with_changes(case: Case, share: float, device: Device, repeats: int, threads: int) -> str:
    """The table of one case whose values change by a share before each transfer."""
    count = case.megabytes * MEGABYTE // 2 // case.num_tensors
    manifest = Manifest(1, tuple(TensorSpec(f"t{index}", (count,), "bfloat16") for index in range(case.num_tensors)))
    tensors = {spec.name: torch.randn(count, device=device.torch_device).bfloat16() for spec in manifest.tensors}

    def change() -> None:
        for tensor in tensors.values():
            tensor[torch.rand(count, device=tensor.device) < share] *= -1

    rows = []
    kinds: list[TransportKind] = ["collective", "disk"]
    for kind in kinds:
        full, all_bytes = transfer(kind, manifest, tensors, device, repeats, threads, change=change)
        took, num_bytes = transfer(kind, manifest, tensors, device, repeats, threads, change=change, sends_changes=True)
        rows.append((kind, "full", f"{all_bytes / MEGABYTE:.2f}", seconds(full), "1", "1"))
        ratios = f"{num_bytes / all_bytes:.4f}", f"{took / full:.2f}"
        rows.append((kind, "changes", f"{num_bytes / MEGABYTE:.2f}", seconds(took), *ratios))
    return table(["", "", "MB", "s", "bytes to full", "time to full"], rows)


def in_parts(case: Case, num_ranks: int, device: Device, repeats: int, threads: int) -> str:
    """The table of one case whose receivers keep some rows each."""
    width = case.width - case.width % num_ranks
    tensors = {f"t{index}": torch.randn(width, width, device=device.torch_device) for index in range(case.num_tensors)}
    manifest = Manifest(1, tuple(TensorSpec(name, (width, width), "float32") for name in tensors))
    rows_of = torch.empty(width, width, device="meta").chunk(num_ranks)
    keep = [dict.fromkeys(tensors, (Region.of(rows),)) for rows in rows_of]
    whole, _ = transfer("collective", manifest, tensors, device, repeats, threads, keep=keep, sends_parts=False)
    taken, num_bytes = transfer("collective", manifest, tensors, device, repeats, threads, keep=keep)
    all_bytes = manifest.num_bytes / MEGABYTE
    rows = [
        ("everything", f"{all_bytes:.2f}", seconds(whole), "1"),
        ("what it keeps", f"{num_bytes / num_ranks / MEGABYTE:.2f}", seconds(taken), f"{taken / whole:.2f}"),
    ]
    return table(["each receiver is sent", "MB", "s", "time to everything"], rows)


def exchanged(case: Case, num_ranks: int, repeats: int, threads: int) -> str:
    """The table of one case whose ranks gather whole tensors, or exchange pieces of them."""
    context, port, pipes = multiprocessing.get_context("spawn"), free_port(), []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        work = case, rank, num_ranks, port, repeats, threads, theirs
        context.Process(target=fill_buckets, args=work, daemon=True).start()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    gathered, exchanged = (
        [sum(column) / num_ranks for column in zip(*way, strict=True)] for way in zip(*found, strict=True)
    )
    rows = [
        (name, f"{arrived / MEGABYTE:.2f}", f"{1e9 * processor / kept:.2f}", f"{processor / gathered[0]:.2f}")
        for name, (processor, arrived, kept) in (("gather whole tensors", gathered), ("exchange pieces", exchanged))
    ]
    return table(["the ranks", "MB arrive at each", "processor ns for a byte that it keeps", "to gathering"], rows)


def fill_buckets(
    case: Case, rank: int, num_ranks: int, port: int, repeats: int, threads: int, pipe: Connection
) -> None:
    """One of the ranks, which sends for each way: seconds of the processor, bytes that arrive, bytes that it keeps."""
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    assert dist.group.WORLD is not None
    width = math.isqrt(case.megabytes * MEGABYTE // 2 // case.num_tensors) // num_ranks * num_ranks
    manifest = Manifest(1, tuple(TensorSpec(f"t{at}", (width, width), "bfloat16") for at in range(case.num_tensors)))
    rows, columns = (torch.empty(width, width, device="meta").chunk(num_ranks, dim)[rank] for dim in (0, 1))
    layout = lay_out(manifest, CPU.bucket_bytes).keeping(
        {spec.name: (Region.of(columns),) for spec in manifest.tensors}
    )
    box = ((rows.storage_offset() // width, rows.storage_offset() // width + len(rows)), (0, width))
    holdings = {spec.name: [HeldPart(box, torch.randn(rows.shape).bfloat16())] for spec in manifest.tensors}
    plan = planned(None, layout, holdings, dist.group.WORLD, CPU.bucket_bytes)
    grouped = layout.grouped(plan.buckets)
    buffer = torch.empty(max(layout.capacity, grouped.capacity), dtype=torch.uint8)
    whole = torch.empty(width, width, dtype=torch.bfloat16)
    num_bytes = manifest.num_bytes * (num_ranks - 1) / num_ranks

    def gather() -> float:
        for bucket in layout.buckets:
            for slot in bucket.slots:
                dist.all_gather_single(whole, holdings[slot.spec.name][0].values)
                slot.fill(buffer, whole)
        return num_bytes

    def exchange() -> float:
        own = Exchange.among_senders(plan, grouped, holdings, torch.device("cpu"))
        for bucket in grouped.buckets:
            own.fill(bucket, buffer)
        own.compare(own.told_digests())
        return float(own.num_bytes_planned)

    kept = float(sum(bucket.num_bytes for bucket in layout.buckets))
    found: list[list[tuple[float, float, float]]] = [[], []]
    for _ in range(repeats + 1):
        for taken, work in zip(found, (gather, exchange), strict=True):
            dist.barrier()
            began, arrived = time.process_time(), work()
            taken.append((time.process_time() - began, arrived, kept))
    pipe.send([tuple(map(min, zip(*taken[1:], strict=True))) for taken in found])
    dist.barrier()
    dist.destroy_process_group()


def transfer(
    kind: TransportKind,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    device: Device,
    repeats: int,
    threads: int,
    *,
    change: Callable[[], None] = lambda: None,
    sends_changes: bool = False,
    keep: Sequence[Parts] = ({},),
    sends_parts: bool = True,
) -> tuple[float, int]:
    """Seconds of the fastest of several transfers, after one that does not count, to processes that copy the tensors
    into their own, and the bytes of the last one.

    Args:
        change: changes the tensors between two transfers.
        keep: the parts that each receiver keeps.
        sends_parts: whether it is sent no more than these.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as folder:
        address = f"{folder}/weights" if kind == "disk" else f"127.0.0.1:{free_port()}"
        transport = Transport(kind, address, len(keep), bucket_bytes=device.bucket_bytes, sends_changes=sends_changes)
        pipes, receivers = [], []
        for rank, parts in enumerate(keep, start=1):
            ours, theirs = context.Pipe()
            work = manifest, transport, rank, parts, sends_parts, theirs, threads
            receivers.append(context.Process(target=receive, args=work, daemon=True))
            receivers[-1].start()
            pipes.append(ours)
        sending, taken = SendingEnd(device), []
        for _ in range(repeats + 1):
            change()
            if transport.ends_meet:
                ask(pipes)
            started = time.perf_counter()
            with sending.transfer(manifest, transport) as sender:
                for name, tensor in tensors.items():
                    sender.put(name, tensor)
                sender.finish()
            if not transport.ends_meet:
                ask(pipes)
            for ours in pipes:
                ours.recv()
            taken.append(time.perf_counter() - started)
        for ours, receiver in zip(pipes, receivers, strict=True):
            ours.close()
            receiver.join()
        sending.close()
    return min(taken[1:]), sender.num_bytes_sent


def ask(pipes: Sequence[Connection]) -> None:
    """Have the receivers begin, once all are ready."""
    for pipe in pipes:
        pipe.send("begin")
    for pipe in pipes:
        pipe.recv()


def receive(
    manifest: Manifest, transport: Transport, rank: int, keeps: Parts, sends_parts: bool, pipe: Connection, threads: int
) -> None:
    """Another process."""
    torch.set_num_threads(threads)
    device = CUDA if torch.cuda.is_available() else CPU
    place = device.torch_device
    whole = {spec.name: torch.zeros(spec.shape, device=place) for spec in manifest.tensors if spec.name not in keeps}
    kept = {name: [torch.zeros(part.size, device=place) for part in parts] for name, parts in keeps.items()}
    receiving = ReceivingEnd(device)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return receiving.close()
        pipe.send("ready")
        with receiving.transfer(manifest, transport, rank, keeps if sends_parts else None) as arriving:
            for name, tensor in arriving:
                if name in whole:
                    whole[name].copy_(tensor)
                for part, target in zip(keeps.get(name, ()), kept.get(name, ()), strict=True):
                    target.copy_(part.read(tensor))
        pipe.send("done")


def copy(tensors: Iterable[tuple[str, torch.Tensor]], targets: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors over targets of the same names."""
    for name, tensor in tensors:
        targets[name].copy_(tensor)


def best(work: Callable[[], object], device: Device, repeats: int) -> float:
    """Seconds of the fastest of several runs, after one that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if device.runs_on_gpus:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
