"""Results of all probes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.devices import Device
from rl_launch.doctor.cluster.node_readings import Readings


@dataclass(frozen=True)
class ClusterNode:
    """A living node of Ray.

    Args:
        name: Its host name if no other node has it, otherwise its address.
        id: Ray's id.
        address: Address, as others reach it.
        hostname: Host name.
        num_devices: GPUs that Ray knows there; CPUs if the recipe runs on the CPU.
        object_store_bytes: Size of Ray's object store.
        is_drivers: True if this process runs there.
    """

    name: str
    id: str
    address: str
    hostname: str
    num_devices: int
    object_store_bytes: int = 0
    is_drivers: bool = False


class NodeClock(NamedTuple):
    """Clock of a node, compared with the driver's.

    Attributes:
        offset_s: Seconds that it is ahead.
        uncertainty_s: Half of the round trip of the comparison.
    """

    offset_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce over the ranks of all nodes.

    Args:
        num_ranks: Number of ranks; 0 if it was not measured.
        num_nodes: Number of nodes that they are on.
        num_bytes: Size of the tensor.
        seconds: Duration; None if it failed.
        problems: Problems by node.
        skipped: Why it was not measured; empty if it was.
        remedy: What to do to have it measured.
    """

    num_ranks: int = 0
    num_nodes: int = 0
    num_bytes: int = 0
    seconds: float | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    skipped: str = ""
    remedy: str = ""

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bus bandwidth: data that each rank must send, by time
        (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
        """
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.num_bytes / self.seconds if self.seconds else None


@dataclass
class Survey:
    """Results by name of the node, as the probes return them; a node that stopped to answer lacks the results of later
    probes.

    Args:
        device: Device of the recipe.
        num_nodes, ranks_per_node: Nodes and devices that the recipe needs.
        autoscaling: True if the cluster adds nodes on request.
        nodes: Living nodes at the start.
        versions: Versions of `python` and `ray` of the driver.
        cuda: CUDA version of the recipe's builds of torch; empty if they have none.
        runs: Folder of runs.
        silent: Why a node stopped to answer.
        clocks: Clocks.
        readings: Facts.
        unshared: Why the folder of runs is not shared.
        unlike_models: Nodes that do not have the driver's model folder, by its key.
        hub: Problems with the model hub.
        rates: Bandwidth in bytes/s by sender and receiver; 0 if no connection was possible.
        broken: Why no connection was possible, by sender and receiver.
        all_reduce: The all-reduce.
    """

    device: Device
    num_nodes: int
    ranks_per_node: int
    nodes: Mapping[str, ClusterNode]
    versions: Mapping[str, str]
    runs: Path
    cuda: str = ""
    autoscaling: bool = False
    silent: dict[str, str] = field(default_factory=dict)
    clocks: Mapping[str, NodeClock] = field(default_factory=dict)
    readings: Mapping[str, Readings] = field(default_factory=dict)
    unshared: Mapping[str, str] = field(default_factory=dict)
    unlike_models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hub: Mapping[str, str] | None = None
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    broken: Mapping[tuple[str, str], str] = field(default_factory=dict)
    all_reduce: AllReduce = AllReduce()

    @property
    def usable(self) -> tuple[str, ...]:
        """Nodes that have the devices of one node of the recipe, and answer."""
        return tuple(
            name
            for name, node in self.nodes.items()
            if node.num_devices >= self.ranks_per_node and name not in self.silent
        )

    def as_json(self) -> dict[str, Any]:
        """Return `nodes`: objects of `name`, `address`, `hostname`, `num_devices`, `problem`, `clock`, `readings`;
        `transfers`: objects of `sender`, `receiver`, `bytes_per_s`, `problem`; `all_reduce`.
        """
        nodes = []
        for name, node in self.nodes.items():
            clock, readings = self.clocks.get(name), self.readings.get(name)
            described: dict[str, Any] = {"name": name, "address": node.address, "hostname": node.hostname}
            described |= {"num_devices": node.num_devices, "problem": self.silent.get(name, "")}
            described["clock"] = None if clock is None else clock._asdict()
            nodes.append({**described, "readings": None if readings is None else asdict(readings)})
        transfers = [
            {"sender": pair[0], "receiver": pair[1], "bytes_per_s": rate, "problem": self.broken.get(pair, "")}
            for pair, rate in self.rates.items()
        ]
        return {
            "nodes": nodes,
            "transfers": transfers,
            "all_reduce": {**asdict(self.all_reduce), "bus_bytes_per_s": self.all_reduce.bus_bytes_per_s},
        }
