"""The virtual cluster: Ray, and the bundles that model workers and replicas are placed on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_launch.root_config import ClusterConfig

# Both must be set before ray is imported: its hook would rebuild the workspace for every worker, and replicas without
# GPUs of Ray's would lose CUDA_VISIBLE_DEVICES.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray runs its workers at a niceness of 15, below every other process of the machine, but here they do the work.
os.environ.setdefault("RAY_worker_niceness", "0")
# The first failure of several workers is raised here; Ray would print the tracebacks of the others.
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_core.devices import NODE_ADDRESS, Device
from rl_core.errors import ConfigError, WorkerDied
from rl_core.ray.host import CONCURRENCY_GROUPS, AsyncWorkerHost, RestartingHost, WorkerHost
from rl_launch.cluster.process_limit import check_process_limit
from rl_launch.cluster.ray_nodes import (
    START_TIMEOUT_S,
    LocalRay,
    RayNodes,
    is_on_this_machine_alone,
    logical_nodes,
    one_node,
)
from rl_launch.cluster.ray_start import connect
from rl_launch.placement.bundles import NodeResources, PlacementTimeouts, Resources, Wait

REPLACEMENT_S = 10.0
"""Maximum seconds for Ray to move bundles once it has noticed that their node is lost; it took 0.1 s."""

PLACEMENT_TIMEOUTS = PlacementTimeouts(busy_s=300.0)
"""Timeouts of a cluster that no config describes."""

_POLL_S = 0.05

MAX_RESTARTS = 1000
"""Restarts of the process of one environment in a run of weeks; that process restarts failed environments itself."""

CALL_ATTEMPTS = 3
"""Deaths of an environment's process that one call may live through."""


@dataclass(frozen=True)
class Bundle:
    """A device for one rank: a slot of a placement group.

    Args:
        group: The placement group.
        index: Position in the group.
        node: Ray's id of the node that it was placed on.
    """

    group: PlacementGroup
    index: int
    node: str


@dataclass(frozen=True)
class WorkerProcess:
    """The settings of an actor's process.

    Args:
        python: Shell command that starts it: the executable of its environment, or a replacement.
        variables: Environment variables.
        node: Ray's id of the node that has this executable.
        num_gpus: GPUs it takes from its bundle.
    """

    python: str
    variables: Mapping[str, str]
    node: str = ""
    num_gpus: float = 0


class VirtualCluster:
    """Ray as this run sees it: some nodes with some devices each.

    Args:
        device: The kind of device. The nodes of a logical one are started here, unless RAY_ADDRESS is set.
        num_nodes: Nodes to use.
        ranks_per_node: Devices (GPUs, or CPU ranks) to use on each.
        timeouts: Timeouts of the wait for them.
        start_timeout_s: Timeout in seconds of a Ray that is started here.
    """

    def __init__(
        self,
        *,
        device: Device,
        num_nodes: int,
        ranks_per_node: int,
        timeouts: PlacementTimeouts = PLACEMENT_TIMEOUTS,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._owns_ray = not ray.is_initialized()
        self._nodes: RayNodes | None = None
        self._groups: dict[PlacementGroup, list[Resources]] = {}
        address = os.environ.get("RAY_ADDRESS")
        if self._owns_ray and not address:
            check_process_limit(num_nodes if device.is_logical else 1, num_nodes * ranks_per_node)
            nodes = logical_nodes(num_nodes, ranks_per_node) if device.is_logical else one_node(ranks_per_node)
            self._nodes = RayNodes(nodes, start_timeout_s)
            address = self._nodes.address
        if self._owns_ray and address:
            try:
                connect(address, is_own=self._nodes is not None)
            except BaseException:
                self.close()
                raise
        self.device = device
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self._timeouts = timeouts
        if device.has_gpus and not timeouts.absent_s and not gpus_of_cluster():
            self.close()
            raise ConfigError(
                f"cluster.device is {device.name}, but the cluster has no GPU; set cluster.device to cpu or auto, or "
                "cluster.autoscaling=true if the cluster adds nodes by itself"
            )

    @classmethod
    def of(cls, config: ClusterConfig, device: Device, *, after_a_loss: bool = False) -> VirtualCluster:
        """Return the cluster of a `cluster` section.

        Args:
            config: The section.
            device: The kind of device.
            after_a_loss: True if the run continues after the loss of a worker or a node: another node may replace it.
        """
        absent_s = config.placement_timeout_s if config.autoscaling else 0.0
        if after_a_loss:
            absent_s = max(absent_s, config.replacement_timeout_s)
        return cls(
            device=device,
            num_nodes=config.num_nodes,
            ranks_per_node=device.ranks_per_node(config),
            timeouts=PlacementTimeouts(busy_s=config.placement_timeout_s, absent_s=absent_s),
            start_timeout_s=config.process_timeout_s,
        )

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reserve(self, num_nodes: int, ranks_per_node: int) -> list[list[Bundle]]:
        """Return bundles by node, with the bundles of a node on one machine.

        Raises:
            PlacementError: If the cluster does not have them, or not in time.
        """
        return self._reserve([[self.device.bundle(1)] * ranks_per_node] * num_nodes)

    def reserve_replicas(self, num_replicas: int, ranks: int, *, least: int, num_nodes: int = 1) -> list[list[Bundle]]:
        """Return the bundles of each replica, one for each of its nodes; see `reserve` for errors.

        At least `least` replicas get them. The wait for the others lasts only until Ray has placed them on free
        devices.

        Args:
            num_replicas: Number of replicas.
            ranks: Ranks of a replica on each of its nodes.
            least: Minimum number of replicas.
            num_nodes: Number of nodes of a replica.
        """
        return self._reserve([[self.device.bundle(ranks)] * num_nodes] * num_replicas, least=least, spread=True)

    def request_replica(self, ranks: int, num_nodes: int = 1) -> list[Bundle]:
        """Ask for the bundles of one replica, without waiting; they are placed once `is_placed`."""
        group = self._new_group([self.device.bundle(ranks)] * num_nodes, spread=True)
        return [Bundle(group, index, "") for index in range(num_nodes)]

    def is_placed(self, bundles: Sequence[Bundle]) -> bool:
        """Return whether all requested bundles of a replica are on living nodes."""
        group = bundles[0].group
        return _is_placed(group) and {_placed(group).get(bundle.index, "") for bundle in bundles} <= _living().keys()

    def release(self, bundles: Sequence[Sequence[Bundle]]) -> None:
        """Release reserved bundles."""
        self._remove(node[0].group for node in bundles)

    def node_of(self, bundle: Bundle) -> str:
        """Return Ray's id of the node of a bundle at present: Ray moves it if its node is lost.

        Raises:
            WorkerDied: If no living node has its devices free.
        """
        end = time.monotonic() + REPLACEMENT_S
        alive = _living()
        while (node := _placed(bundle.group).get(bundle.index, "")) not in alive:
            if time.monotonic() >= end:
                raise WorkerDied("the node of its devices is lost, and no other node has such devices free")
            time.sleep(_POLL_S)
            alive = _living()
        return node

    @property
    def network_variables(self) -> Mapping[str, str]:
        """Environment variables that make workers listen on loopback only, if all of them are on this machine."""
        if not is_on_this_machine_alone():
            return {}
        loopback = {NODE_ADDRESS: "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return {name: os.environ.get(name, value) for name, value in loopback.items()}

    def _new_group(self, bundles: Sequence[Resources], *, spread: bool) -> PlacementGroup:
        """Ask for bundles on one node, or with `spread` each on a node of its own."""
        several = spread and len(bundles) > 1
        group = placement_group([dict(each) for each in bundles], strategy=f"STRICT_{'SPREAD' if several else 'PACK'}")
        names = dict.fromkeys(name for bundle in bundles for name in bundle)
        together = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}
        self._groups[group] = list(bundles) if several else [together]
        return group

    def _reserve(
        self, requests: Sequence[Sequence[Resources]], *, least: int | None = None, spread: bool = False
    ) -> list[list[Bundle]]:
        earlier = [each for nodes in self._groups.values() for each in nodes]
        groups = [self._new_group(bundles, spread=spread) for bundles in requests]
        num_needed = len(groups) if least is None else least
        needed = [*earlier, *(each for group in groups[:num_needed] for each in self._groups[group])]
        wait = Wait(needed, self._timeouts, keys=f"cluster.num_nodes and {self.device.ranks_key}")
        pause_s, settled = _POLL_S, time.monotonic() + REPLACEMENT_S
        while waiting := [group for group in groups if not _is_placed(group)]:
            if len(groups) - len(waiting) >= num_needed:
                if time.monotonic() >= settled:
                    break
            else:
                num_placed = sum(len(self._groups[group]) for group in groups if group not in waiting)
                wait.check(list(_living().values()), len(earlier) + num_placed, time.monotonic())
            time.sleep(pause_s)
            pause_s = min(1.0, 1.5 * pause_s)
        self._remove(waiting)
        return [
            [Bundle(group, index, _placed(group)[index]) for index in range(len(bundles))]
            for group, bundles in zip(groups, requests, strict=True)
            if group not in waiting
        ]

    def _remove(self, groups: Iterable[PlacementGroup]) -> None:
        for group in groups:
            del self._groups[group]
            remove_placement_group(group)

    def start_worker(self, process: WorkerProcess, bundle: Bundle) -> ActorHandle:
        """Start an empty `WorkerHost` on a bundle."""
        remote: Any = ray.remote
        host = remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerHost)
        return host.options(**_options(process, bundle)).remote()

    def start_async_worker(self, process: WorkerProcess, *, bundle: Bundle | None = None) -> ActorHandle:
        """Start an empty `AsyncWorkerHost` on a bundle, or on the node of the process."""
        host: Any = ray.remote(AsyncWorkerHost)
        return host.options(**_options(process, bundle), max_concurrency=10_000).remote()

    def start_restarting_worker(
        self, process: WorkerProcess, *recipe: Any, actor_name: str | None = None, **named: Any
    ) -> ActorHandle:
        """Start a `RestartingHost` on the node of the process. Ray restarts it if it dies, and repeats its calls.

        Args:
            process: Its process.
            *recipe: Its arguments.
            actor_name: Name by which other actors of the run find it; None for none.
            **named: Further arguments.
        """
        options = _options(process) | {"max_restarts": MAX_RESTARTS, "max_task_retries": CALL_ATTEMPTS}
        if actor_name is not None:
            options["name"] = actor_name
        host: Any = ray.remote(RestartingHost)
        return host.options(**options, max_concurrency=10_000).remote(*recipe, **named)

    def local_ray(self) -> LocalRay:
        """Return the connections of this process to Ray on this machine."""
        return LocalRay(self._nodes.processes() if self._nodes is not None else {})

    def kill(self) -> None:
        """Kill a Ray that this object started, in any state, as soon as this process has ended."""
        if self._nodes is not None:
            self._nodes.kill_afterwards()

    def close(self) -> None:
        """Release all bundles, and end Ray if this object started it."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        if self._owns_ray:
            ray.shutdown()
        if self._nodes is not None:
            self._nodes.close()


def gpus_of_cluster() -> float:
    """Count the GPUs of all nodes of the cluster at RAY_ADDRESS."""
    connects = not ray.is_initialized()
    if connects:
        connect(os.environ["RAY_ADDRESS"], is_own=False)
    try:
        return sum(node.total.get("GPU", 0) for node in _living().values())
    finally:
        if connects:
            ray.shutdown()


def _living() -> dict[str, NodeResources]:
    """Return the living nodes by Ray's id, with their resources."""
    living = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: NodeResources(node["NodeManagerAddress"], node["Resources"]) for node in living}


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] == "CREATED")


def _placed(group: PlacementGroup) -> dict[int, str]:
    """Return Ray's id of the node of each bundle."""
    return dict(placement_group_table(group)["bundles_to_node_id"])


def _options(process: WorkerProcess, bundle: Bundle | None = None) -> dict[str, Any]:
    environment = {"py_executable": process.python, "env_vars": dict(process.variables)}
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": process.num_gpus, "runtime_env": environment}
    if bundle is not None:
        group, index = bundle.group, bundle.index
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    elif process.node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(process.node, soft=False)
    return options
