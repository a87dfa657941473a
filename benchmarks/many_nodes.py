"""Start of the processes of a model's ranks over many nodes, by the number of nodes.

    uv run --group cpu benchmarks/many_nodes.py [--nodes 4 8 16 32] [--workers 8] [--gib 12]

Ray nodes are logical (`cluster.device=rehearsal`): each has its own address, and all are on this machine. The driver's
part is the product's own: it reserves devices, checks every node, starts the processes and waits until all of them have
answered and write to their logs. Workers are light: they have imported what a rank imports, and build no model.

Seconds are those of everything together on this machine; a cluster has the cores of every node. The processor seconds
of the driver and of Ray's control service (GCS), which every node and worker needs, are what a cluster does not divide
among its nodes. Handshakes are the connections that these two have open in the end.

A node takes about 0.2 GiB, and a worker 0.05. The benchmark ends itself, and all that it has started, above `--gib`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import psutil
from measurement import surroundings, table
from processes import family, num_sockets
from rich.console import Console

from rl_core.devices import REHEARSAL
from rl_launch.cluster import ray_nodes
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.models import ModelGroup
from rl_launch.runtime.processes import provision_workers
from rl_launch.runtime.runtime import Runtime

ROLE = "policy"
WATCH_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32], help="nodes (4 8 16 32)")
    parser.add_argument("--workers", type=int, default=8, help="workers of each node (%(default)s)")
    parser.add_argument("--gib", type=float, default=12.0, help="memory at which the benchmark ends (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.workers = [2], 1
    console = Console()
    console.print(surroundings("rl-launch", "ray"))
    rows = []
    for num_nodes in args.nodes:
        with watched(args.gib) as peak:
            rows.append([*started(num_nodes, args.workers), f"{peak[0]:.1f}"])
        print(rows[-1], file=sys.stderr, flush=True)
    seconds = ["Ray's nodes", "devices", "checks", "workers"]
    used = ["driver s", "GCS s", "all s per worker"]
    held = ["connections of the driver", "of GCS", "GiB"]
    console.print(table(["nodes", "workers", *(f"{name}, s" for name in seconds), *used, *held], rows), soft_wrap=True)


def started(num_nodes: int, per_node: int) -> list[str]:
    """Start the workers; a row of the table."""
    overrides = ["cluster.device=rehearsal", f"cluster.num_nodes={num_nodes}", f"cluster.gpus_per_node={per_node}"]
    plan = read_plan("sft-arithmetic", [*overrides, f"policy.train_global_batch_size={num_nodes * per_node}"])
    envs = provision_workers(plan, None, REHEARSAL)
    driver, marks = psutil.Process(), [time.monotonic()]
    before = sum(driver.cpu_times()[:2])
    most = mock.patch.object(ray_nodes, "MAX_NODES", max(ray_nodes.MAX_NODES, num_nodes))
    # The folder of the run is a short path: Ray's sockets have it in their names.
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as folder, most:
        logs = Path(folder) / "run" / "logs"
        logs.mkdir(parents=True)
        cluster = VirtualCluster(device=REHEARSAL, num_nodes=num_nodes, ranks_per_node=per_node, start_timeout_s=1800)
        with cluster, Runtime(plan, envs, cluster, logs) as runtime:
            marks.append(time.monotonic())
            bundles = cluster.reserve(num_nodes, per_node)
            marks.append(time.monotonic())
            runtime._processes.prepare((node[0].node, ROLE) for node in bundles)
            marks.append(time.monotonic())
            group = ModelGroup(runtime._processes, bundles, role=ROLE, section=ROLE, num_gpus=1)
            marks.append(time.monotonic())
            assert len({(place.address, place.port) for place in group.places}) == num_nodes * per_node
            assert len(list(logs.glob("*.log"))) == num_nodes * per_node
            gcs = cluster.local_ray().processes[ray_nodes.GCS]
            used = [sum(driver.cpu_times()[:2]) - before, sum(gcs.cpu_times()[:2])]
            whole = used[0] + sum(sum(each.cpu_times()[:2]) for each in family(driver)[1:])
            held = [num_sockets(driver.pid), num_sockets(gcs.pid)]
    seconds = [f"{after - since:.1f}" for since, after in itertools.pairwise(marks)]
    count = num_nodes * per_node
    return [
        str(num_nodes),
        str(count),
        *seconds,
        *(f"{each:.1f}" for each in used),
        f"{whole / count:.2f}",
        *map(str, held),
    ]


@contextmanager
def watched(most_gib: float) -> Iterator[list[float]]:
    """End this process and all that it has started if they hold more memory; yield the peak in GiB."""
    done, peak, driver = threading.Event(), [0.0], psutil.Process()

    def watch() -> None:
        while not done.wait(WATCH_S):
            processes, held = family(driver)[1:], 0
            for each in processes:
                with suppress(psutil.Error):
                    held += each.memory_full_info().pss
            peak[0] = max(peak[0], held / 2**30)
            if peak[0] > most_gib:
                print(f"{peak[0]:.1f} GiB are more than --gib {most_gib}", file=sys.stderr, flush=True)
                for each in processes:
                    with suppress(psutil.Error):
                        each.kill()
                os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
