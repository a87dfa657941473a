"""Bytes per second of a weight transfer between two processes, next to a plain copy in memory of the same tensors.

    python benchmarks/weight_sync.py [MB:TENSORS ...] [--adapter DIM | --changes SHARE | --ranks N | --exchange N |
        --apart N]

Needs rl-core with its extra `torch`; runs on a GPU if there is one, else on the CPU. A transfer is timed from its
beginning to the last acknowledged digest, as in every step of a run: tensors are copied into buckets and out of them
again, and digests taken at both ends. The first does not count, because the ends connect and make their buffers in it.
Through files, which the sender writes before they are read, it lasts until the receiver has read them.

With `--adapter` the tensors are square matrices with an adapter each, and a transfer of the matrices, once the adapters
are merged into them, is compared with one of the adapters' factors alone (`policy.generation.lora_sync`).

With `--changes` the tensors are bfloat16, and a share of their values changes before each transfer. Transfers of all
weights are compared with transfers of the changed ones (`policy.generation.weight_sync_encoding`).

With `--ranks` the tensors are square matrices for N receivers, like the ranks of a tensor-parallel engine. A transfer
that sends each receiver the rows that it keeps is compared with one that sends each everything.

With `--exchange` the tensors are square bfloat16 matrices, whose rows are divided over N ranks of a policy. Each rank
fills buckets with some columns for its receiver: after it has gathered whole tensors, or by an exchange of pieces
(`policy.generation.weight_sync_encoding: parts`), in turn. Both are timed without the hop to the receiver.

With `--apart` the same ranks send to N receivers on other devices, and each receiver keeps some columns. The policy's
ranks gather whole tensors, and the first one sends each receiver its columns, or all of them exchange pieces, in turn.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Barrier
from typing import Any, get_args

import torch
import torch.distributed as dist
from measurement import seconds, surroundings, table

from rl_core.devices import CPU, CUDA, Device
from rl_core.selfcheck.rank_pool import free_port
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
        """Return the case that `MB:TENSORS` describes."""
        megabytes, _, num_tensors = text.partition(":")
        if not (megabytes.isdigit() and num_tensors.isdigit() and int(megabytes) and int(num_tensors)):
            raise argparse.ArgumentTypeError(f"got {text!r}; write MB:TENSORS, such as 100:12")
        return cls(int(megabytes), int(num_tensors))

    def manifest(self) -> Manifest:
        """Return the manifest of the tensors."""
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
    parser.add_argument("--apart", type=int, metavar="N", help="the same with N receivers on other devices")
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
        elif chosen.apart:
            print(exchanged_apart(case, chosen.apart, repeats, chosen.threads))
        elif chosen.changes is not None:
            print(with_changes(case, chosen.changes, device, repeats, chosen.threads))
        else:
            print(measured(case, device, repeats, chosen.threads))
        print()


def measured(case: Case, device: Device, repeats: int, threads: int) -> str:
    """Return the table of one case."""
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
    """Return the table of one case with adapters, merged and alone."""
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
    """Return the table of one case whose values change by a share before each transfer."""
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
    """Return the table of one case whose receivers keep some rows each."""
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
    """Return the table of one case whose ranks gather whole tensors, or exchange pieces of them."""
    port = free_port()
    found = results_of(
        [(fill_buckets, (case, rank, num_ranks, port, repeats, threads)) for rank in range(num_ranks)],
        multiprocessing.get_context("spawn"),
    )
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
    """Run one of the ranks, which sends for each way: seconds of the processor, bytes that arrive, bytes that it
    keeps."""
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


@dataclass(frozen=True)
class Matrices:
    """Square bfloat16 matrices, whose rows are divided over the ranks of a policy, and whose columns over receivers.

    Args:
        width: Rows and columns of each.
        count: Number of matrices.
        num_ranks: Number of ranks on either side.
    """

    width: int
    count: int
    num_ranks: int

    @classmethod
    def of(cls, case: Case, num_ranks: int) -> Matrices:
        """Return the matrices of a case, of about its size."""
        width = math.isqrt(case.megabytes * MEGABYTE // 2 // case.num_tensors)
        return cls(width // num_ranks * num_ranks, case.num_tensors, num_ranks)

    def manifest(self, *, in_parts: bool) -> Manifest:
        """Return the manifest of the matrices."""
        specs = (TensorSpec(f"t{at}", (self.width, self.width), "bfloat16") for at in range(self.count))
        return Manifest(1, tuple(specs), is_held_in_parts=in_parts)

    def kept(self, rank: int) -> Parts:
        """Return the parts that a receiver keeps."""
        columns = torch.empty(self.width, self.width, device="meta").chunk(self.num_ranks, 1)[rank]
        return {f"t{at}": (Region.of(columns),) for at in range(self.count)}

    def held(self, rank: int) -> dict[str, list[HeldPart]]:
        """Return the parts that a rank of the policy holds, the same at every call."""
        rows = self.width // self.num_ranks
        box = ((rank * rows, (rank + 1) * rows), (0, self.width))
        random = torch.Generator().manual_seed(rank)
        return {
            f"t{at}": [HeldPart(box, torch.randn(rows, self.width, generator=random).bfloat16())]
            for at in range(self.count)
        }


def exchanged_apart(case: Case, num_ranks: int, repeats: int, threads: int) -> str:
    """Return the table of one case whose receivers are on other devices."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    transports = [
        Transport("collective", f"127.0.0.1:{free_port()}", num_ranks, CPU.bucket_bytes, every_rank_sends=in_parts)
        for in_parts in (False, True)
    ]
    matrices, barrier, works = Matrices.of(case, num_ranks), context.Barrier(2 * num_ranks), []
    for place in range(2 * num_ranks):
        work = send_apart if place < num_ranks else receive_apart
        works.append((work, (matrices, transports, place % num_ranks, port, repeats, threads, barrier)))
    found = results_of(works, context)
    assert len({tuple(sums) for _, sums in found[num_ranks:]}) == num_ranks, "receivers keep different columns"
    assert all(len(set(sums)) == 1 for _, sums in found[num_ranks:]), "both ways bring the same values"
    kept = matrices.width**2 * 2 * matrices.count
    used = [sum(column) for column in zip(*(taken for taken, _ in found), strict=True)]
    busiest = [max(column) for column in zip(*(taken for taken, _ in found), strict=True)]
    rows = [
        (name, f"{1e9 * whole / kept:.2f}", f"{whole / used[0]:.2f}", f"{1e9 * most / kept:.2f}")
        for name, whole, most in zip(("gather, then one sends", "exchange pieces"), used, busiest, strict=True)
    ]
    columns = ["processor ns of all ranks for a byte of the model", "to gathering", "of the busiest rank"]
    return table(["the ranks", *columns], rows)


def results_of(works: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], context: SpawnContext) -> list[Any]:
    """Return the object that each work sends through the pipe that is its last argument. Each runs in its own process,
    and all have ended when this returns, so that none takes time from the next measurement."""
    pipes, processes = [], []
    for work, given in works:
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=work, args=(*given, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


def send_apart(
    matrices: Matrices,
    transports: Sequence[Transport],
    rank: int,
    port: int,
    repeats: int,
    threads: int,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    """Run one of the policy's ranks, which sends its processor seconds of each way."""
    torch.set_num_threads(threads)
    store = dist.TCPStore("127.0.0.1", port, matrices.num_ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=matrices.num_ranks)
    holdings, whole = matrices.held(rank), torch.empty(matrices.width, matrices.width, dtype=torch.bfloat16)
    gathering, exchanging = SendingEnd(CPU), SendingEnd(CPU)

    def gather() -> None:
        with ExitStack() as stack:
            manifest, senders = matrices.manifest(in_parts=False), []
            if rank == 0:
                senders.append(stack.enter_context(gathering.transfer(manifest, transports[0])))
            for name, (part,) in holdings.items():
                dist.all_gather_single(whole, part.values)
                for sender in senders:
                    sender.put(name, whole)
            for sender in senders:
                sender.finish()

    def exchange() -> None:
        manifest = matrices.manifest(in_parts=True)
        exchanging.exchange(manifest, transports[1], rank, matrices.num_ranks, lambda: holdings)

    pipe.send((processor_seconds_of((gather, exchange), repeats, barrier), [0.0, 0.0]))
    barrier.wait()
    for end in (gathering, exchanging):
        end.close()
    dist.destroy_process_group()


def receive_apart(
    matrices: Matrices,
    transports: Sequence[Transport],
    rank: int,
    port: int,
    repeats: int,
    threads: int,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    """Run a receiver, which sends its processor seconds of each way and the sum of the values that it keeps."""
    torch.set_num_threads(threads)
    ends, keeps, sums = (ReceivingEnd(CPU), ReceivingEnd(CPU)), matrices.kept(rank), [0.0, 0.0]
    kept = {name: torch.empty(parts[0].size, dtype=torch.bfloat16) for name, parts in keeps.items()}

    def receive(way: int) -> None:
        manifest = matrices.manifest(in_parts=bool(way))
        with ends[way].transfer(manifest, transports[way], rank + 1, keeps) as arriving:
            for name, tensor in arriving:
                kept[name].copy_(keeps[name][0].read(tensor))

    def total(way: int) -> None:
        sums[way] = sum(float(tensor.double().sum()) for tensor in kept.values())

    found = processor_seconds_of((partial(receive, 0), partial(receive, 1)), repeats, barrier, total)
    pipe.send((found, sums))
    barrier.wait()
    for end in ends:
        end.close()


def processor_seconds_of(
    ways: Sequence[Callable[[], None]], repeats: int, barrier: Barrier, after: Callable[[int], None] = lambda way: None
) -> list[float]:
    """Return the minimum seconds of this process for each way. All processes take the ways in turn, and the first turn,
    when they connect, does not count.

    Args:
        ways: The work of this process.
        repeats: Counted turns.
        barrier: Of all processes.
        after: Called after each turn, uncounted.
    """
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(repeats + 1):
        for way, work in enumerate(ways):
            barrier.wait()
            began = time.process_time()
            work()
            taken[way].append(time.process_time() - began)
            after(way)
    return [min(each[1:]) for each in taken]


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
    """Return the seconds of the fastest of several transfers, after one that does not count, to processes that copy the
    tensors into their own, and the bytes of the last one.

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
    """Receive transfers in a process of its own."""
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
    """Return the seconds of the fastest of several runs, after one that does not count."""
    work()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if device.runs_on_gpus:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken)


if __name__ == "__main__":
    main()
