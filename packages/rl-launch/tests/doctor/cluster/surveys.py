"""Surveys of clusters that do not exist."""

from dataclasses import replace
from pathlib import Path

from rl_core.devices import CUDA
from rl_launch.cluster.node_task import NodeFacts
from rl_launch.doctor.cluster.node_readings import GpuReading, GpuReadings, Readings
from rl_launch.doctor.cluster.survey import ClusterNode, NodeClock, Survey
from rl_launch.doctor.room import Room

GIB = 2**30
TEN_GIGABITS = 1.25e9
H100 = GpuReadings(
    driver="580.65.06",
    cuda="13.0",
    gpus=tuple(GpuReading(index, "NVIDIA H100", 80 * GIB, 0, 18, 450e9) for index in range(8)),
)
ROOM = Room("/there", 100 * GIB, 80 * GIB, is_writable=True)
READINGS = Readings(
    python="3.12.4",
    ray="2.60.0",
    kernel="6.8.0",
    facts=NodeFacts(96, "eth0", {}),
    gpus=H100,
    rooms={"runs": ROOM, "Ray": ROOM},
    shared_memory=replace(ROOM, folder="/dev/shm"),
    limits={"nofile": 2**20, "nproc": None, "memlock": None},
    ethernet_bytes_per_s=TEN_GIGABITS,
    infiniband_bytes_per_s={"mlx5_0/1": 50e9},
    inactive_infiniband=(),
)


def survey(count=3, *, node=None, readings=None, **changed):
    """A healthy survey of n0, n1 and so on.

    Args:
        count: Number of nodes.
        node: Node whose readings differ.
        readings: Readings of that node that differ.
        changed: Further fields that differ.
    """
    names = [f"n{number}" for number in range(count)]
    found = dict.fromkeys(names, READINGS)
    if node is not None:
        found[node] = replace(READINGS, **readings)
    fields = {
        "device": CUDA,
        "num_nodes": count,
        "ranks_per_node": 8,
        "nodes": {name: ClusterNode(name, name, f"10.0.0.{name[1:]}", name, 8, 30 * GIB) for name in names},
        "versions": {"python": "3.12.4", "ray": "2.60.0"},
        "runs": Path("/shared/runs"),
        "clocks": dict.fromkeys(names, NodeClock(0.001, 0.0005)),
        "readings": found,
        "rates": {(one, other): TEN_GIGABITS * 0.9 for one in names for other in names if one != other},
    }
    return Survey(**fields | changed)
