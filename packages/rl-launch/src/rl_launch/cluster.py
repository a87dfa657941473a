"""The virtual cluster: Ray, and the bundles that model workers and replicas are placed on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

# both must be set before ray is imported: its hook would rebuild the workspace for every worker, and replicas without
# GPUs of Ray's would lose CUDA_VISIBLE_DEVICES
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray has its workers give way to every other process of the machine (niceness 15); here they are the work
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_core.devices import NODE_ADDRESS, Device
from rl_core.errors import ConfigError
from rl_core.ray.host import AsyncWorkerHost, RestartingHost, WorkerHost
from rl_launch.logical_nodes import LogicalNodes
from rl_launch.ray_start import connect, start_on_this_machine

_log = logging.getLogger(__name__)

MOST_RESTARTS = 1000
"""Of one environment's process in a run of weeks; its own failures it restarts below that process."""

CALL_ATTEMPTS = 3
"""Deaths of an environment's process that one call may live through."""


@dataclass(frozen=True)
class Bundle:
    """A device for one rank: a slot of a placement group."""

    group: PlacementGroup
    index: int


@dataclass(frozen=True)
class WorkerProcess:
    """How an actor's process is made.

    Args:
        python: executable of its environment.
        variables: environment variables.
        num_gpus: GPUs it takes from its bundle.
    """

    python: str
    variables: Mapping[str, str]
    num_gpus: float = 0


class VirtualCluster:
    """Ray as this run sees it: some nodes with some devices each.

    Args:
        device: what models run on. A logical one has its nodes started here, unless RAY_ADDRESS names some.
        num_nodes: nodes to use.
        ranks_per_node: devices (GPUs, or CPU ranks) to use on each.
    """

    def __init__(self, *, device: Device, num_nodes: int, ranks_per_node: int) -> None:
        self._owns_ray = not ray.is_initialized()
        self._logical: LogicalNodes | None = None
        address = os.environ.get("RAY_ADDRESS")
        if self._owns_ray and address:
            connect(address)
        elif self._owns_ray and device.is_logical:
            self._logical = LogicalNodes(num_nodes, ranks_per_node)
            connect(self._logical.address)
        elif self._owns_ray:
            start_on_this_machine(ranks_per_node)
        self.device = device
        self.num_nodes = num_nodes
        self.ranks_per_node = ranks_per_node
        self._groups: list[PlacementGroup] = []
        if device.has_gpus and not ray.cluster_resources().get("GPU"):
            self.close()
            raise ConfigError(
                f"cluster.device is {device.name}, but the cluster has no GPU; set cluster.device to cpu or auto"
            )

    @classmethod
    def of(cls, config: Any, device: Device) -> VirtualCluster:
        """The cluster a `cluster` section describes."""
        return cls(device=device, num_nodes=config.num_nodes, ranks_per_node=device.ranks_per_node(config))

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reserve(self, num_nodes: int, ranks_per_node: int, timeout_s: float = 300.0) -> list[list[Bundle]]:
        """Bundles by node, each node's on one machine.

        Raises:
            ConfigError: where the cluster does not have them in time, saying what it has.
        """
        return self._reserve([[self.device.bundle(1)] * ranks_per_node] * num_nodes, timeout_s)

    def reserve_replicas(self, num_replicas: int, ranks: int, timeout_s: float = 300.0) -> list[list[Bundle]]:
        """One bundle with the devices of all ranks for each replica; raises as `reserve`."""
        return self._reserve([[self.device.bundle(ranks)]] * num_replicas, timeout_s)

    def release(self, bundles: Sequence[Sequence[Bundle]]) -> None:
        """Give reserved bundles back."""
        for node in bundles:
            group = node[0].group
            self._groups.remove(group)
            remove_placement_group(group)

    @property
    def network_variables(self) -> Mapping[str, str]:
        """Environment variables that keep what workers listen on to this machine, if all of them are on it."""
        is_one_machine = self._owns_ray and not self._logical and not os.environ.get("RAY_ADDRESS")
        loopback = {NODE_ADDRESS: "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        return {name: os.environ.get(name, value) for name, value in loopback.items()} if is_one_machine else {}

    def _reserve(self, nodes: Sequence[Sequence[dict[str, float]]], timeout_s: float) -> list[list[Bundle]]:
        groups = [placement_group(list(bundles), strategy="STRICT_PACK") for bundles in nodes]
        self._groups += groups
        waiting = [group.ready() for group in groups]
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
        if late:
            raise ConfigError(
                f"asked for {[list(bundles) for bundles in nodes]}, each list on one node, but {len(late)} of them "
                f"could not be had within {timeout_s:.0f} s; the cluster has {dict(ray.cluster_resources())}"
            )
        return [
            [Bundle(group, index) for index in range(len(bundles))]
            for group, bundles in zip(groups, nodes, strict=True)
        ]

    def start_worker(self, process: WorkerProcess, bundle: Bundle) -> ActorHandle:
        """An empty `WorkerHost` on a bundle."""
        options = _options(process, num_cpus=0) | {"scheduling_strategy": _on_bundle(bundle)}
        return ray.remote(concurrency_groups={"health": 1})(WorkerHost).options(**options).remote()

    def start_async_worker(
        self, process: WorkerProcess, *, bundle: Bundle | None = None, node: str = ""
    ) -> ActorHandle:
        """An empty `AsyncWorkerHost` on a bundle, on a node by id, or anywhere."""
        options = _options(process, num_cpus=0)
        if bundle is not None:
            options["scheduling_strategy"] = _on_bundle(bundle)
        elif node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(AsyncWorkerHost).options(**options, max_concurrency=10_000).remote()

    def start_restarting_worker(self, process: WorkerProcess, *recipe: Any, **named: Any) -> ActorHandle:
        """A `RestartingHost` anywhere, started again by Ray where its process dies, and its calls made again."""
        options = _options(process, num_cpus=0) | {"max_restarts": MOST_RESTARTS, "max_task_retries": CALL_ATTEMPTS}
        return ray.remote(RestartingHost).options(**options, max_concurrency=10_000).remote(*recipe, **named)

    def close(self) -> None:
        """Give back what is reserved, and end Ray where this object started it."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        if self._owns_ray:
            ray.shutdown()
        if self._logical is not None:
            self._logical.close()


def _on_bundle(bundle: Bundle) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)


def _options(process: WorkerProcess, *, num_cpus: float) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "num_gpus": process.num_gpus,
        "runtime_env": {"py_executable": process.python, "env_vars": dict(process.variables)},
    }
