"""Start of a model's ranks and the plan of its first checkpoint, by the number of ranks.

    uv run --group cpu benchmarks/many_ranks.py [--ranks 8 16 32 64 128] [--items 2344]

Ranks are forked from one process that has imported torch, join one model's groups on the CPU (`DTensorMesh.join`, as
workers do) and add one number up over all of them. Everything runs on this machine, so that seconds are the sum of all
ranks; a cluster has the cores of every node. Handshakes are the keys of the store through which the ranks meet, and the
open connections of a rank.

The plan is made by rank 0 from so many items of each rank, which it unpickles, compares, numbers and pickles for the
ranks. The second save is planned from what the planner has kept.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measurement import surroundings, table
from processes import num_sockets
from rich.console import Console
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from rl_core.model import Rendezvous
from rl_core.selfcheck.rank_pool import free_port
from rl_core.torch.training.checkpoint_files import KeptSavePlanner
from rl_dtensor.config import DTensorConfig
from rl_dtensor.parallel.mesh import DTensorMesh


def join(rank: int, num_ranks: int, port: int, answers: int) -> None:
    """Join the groups of a model as one of its ranks, use them once, and write the handshakes to a pipe."""
    torch.set_num_threads(1)
    tensor_ranks = min(8, num_ranks)
    config = DTensorConfig(tensor_parallel_size=tensor_ranks)
    mesh = DTensorMesh.join(Rendezvous(rank, num_ranks, rank % 8, "127.0.0.1", port, "cpu"), config)
    total = torch.ones(())
    dist.all_reduce(total, group=mesh.control)
    assert total == num_ranks
    dist.all_reduce(total, group=mesh.group("tp"))
    dist.barrier(group=mesh.control)
    keys = dist.distributed_c10d._get_default_store().num_keys() if rank == 0 else 0
    os.write(answers, f"{keys} {num_sockets(os.getpid())}\n".encode())
    dist.barrier(group=mesh.control)


def started(num_ranks: int) -> tuple[float, float, int, int]:
    """Return the seconds of the start, processor seconds of all ranks, keys of the store, and connections of the
    busiest rank."""
    port = free_port()
    reading, writing = os.pipe()
    begun, before = time.monotonic(), _children_seconds()
    children = []
    for rank in range(num_ranks):
        if not (child := os.fork()):
            _run(lambda rank=rank: join(rank, num_ranks, port, writing))
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as answers:
        found = [tuple(int(word) for word in line.split()) for line in answers]
    seconds = time.monotonic() - begun
    ends = [os.waitpid(child, 0)[1] for child in children]
    assert not any(ends), "every rank joins"
    assert len(found) == num_ranks
    keys, connections = (max(each[place] for each in found) for place in (0, 1))
    return seconds, _children_seconds() - before, keys, connections


def _run(work: Callable[[], None]) -> None:
    """Do the work of a forked process, and end it."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def plan_of(rank: int, num_ranks: int, num_items: int) -> SavePlan:
    """Return the plan of a rank that holds a slice of every tensor, of no data."""
    rows, columns = 8, 64
    chunk = ChunkStorageMetadata(torch.Size([rank * rows, 0]), torch.Size([rows, columns]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([num_ranks * rows, columns]))
    names = (f"model.layers.{number}.weight" for number in range(num_items))
    items = [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data) for name in names]
    return SavePlan(items, planner_data={})


def planned(num_ranks: int, num_items: int) -> tuple[float, float, float, float]:
    """Return the processor seconds of rank 0: to receive the items, to plan, to send the plans, and to plan again."""
    planner = KeptSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    planner.create_local_plan()
    sent = [pickle.dumps(plan_of(rank, num_ranks, num_items)) for rank in range(num_ranks)]
    marks = [time.process_time()]
    plans = [pickle.loads(each) for each in sent]
    del sent
    marks.append(time.process_time())
    whole, _ = planner.create_global_plan(plans)
    marks.append(time.process_time())
    assert sum(len(plan.items) for plan in whole) == num_ranks * num_items
    for plan in whole:
        pickle.dumps(plan)
    marks.append(time.process_time())
    kept, _ = planner.create_global_plan([SavePlan([], usable=False)] * num_ranks)
    marks.append(time.process_time())
    assert not any(plan.usable for plan in kept), "every rank uses the plan it has"
    planner.end_planning()
    planner.forget()
    received, made, given, again = (after - before for before, after in itertools.pairwise(marks))
    return received, made, given, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="ranks that start")
    parser.add_argument("--plans", type=int, nargs="+", default=[64, 512], help="ranks whose save is planned")
    parser.add_argument("--items", type=int, default=2344, help="tensors that each rank saves a part of (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.plans, args.items = [2, 4], [4], 16
    console = Console()
    console.print(surroundings("torch"))
    rows = []
    for num_ranks in args.ranks:
        seconds, used, keys, connections = started(num_ranks)
        per_rank = [f"{used / num_ranks:.3f}", f"{keys / num_ranks:.1f}", str(connections)]
        rows.append([str(num_ranks), f"{seconds:.1f}", *per_rank])
    head = ["ranks", "seconds", "processor s per rank", "keys of the store per rank", "connections of a rank"]
    console.print(table(head, rows), soft_wrap=True)
    rows = []
    for num_ranks in args.plans:
        received, made, given, again = planned(num_ranks, args.items)
        total = received + made + given
        figures = [f"{value:.2f}" for value in (received, made, given, total)]
        rows.append([str(num_ranks), f"{num_ranks * args.items:,}", *figures, f"{again:.4f}"])
    console.print(
        table(["ranks", "items", "received s", "planned s", "sent s", "together s", "second save s"], rows),
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
