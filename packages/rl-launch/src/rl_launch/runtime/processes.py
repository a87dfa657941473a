"""How the processes of a run's workers are made."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl_core.config import EnvVars
from rl_core.devices import Device
from rl_core.fork_server import IDLE_S, shell_command
from rl_core.plugins import Preload
from rl_launch.cluster.nodes import Nodes
from rl_launch.cluster.virtual_cluster import VirtualCluster, WorkerProcess
from rl_launch.placement.topology import GENERATION, Topology
from rl_launch.root_config import DRAFTER, POLICY
from rl_launch.worker_envs import chosen_variables, worker_variables


def server_stay_s(chosen: float | None, device: Device) -> float:
    """Seconds for which a fork server of workers stays without work; 0 for none.

    Args:
        chosen: Value of `cluster.fork_server_s`; None for the default of the device.
        device: Device of the workers.
    """
    default_s = IDLE_S if device.forks_workers else 0.0
    return default_s if chosen is None else chosen


def variables_of_worker(
    python: str, preload: Preload, device: Device, *env_vars: EnvVars, num_threads: int
) -> dict[str, str]:
    """Return the environment variables of a worker's process that do not depend on its node's network.

    Args:
        python: Interpreter of its environment.
        preload: Modules and variables that its backend names.
        device: Kind of device that it computes on.
        env_vars: Sections of the config that apply to it, from the most general to its own.
        num_threads: Number of threads that it computes with on the CPU.
    """
    return {
        **worker_variables(python),
        **preload.variables,
        **device.worker_variables(num_threads),
        **chosen_variables(*env_vars),
    }


def with_allocators(preloads: Mapping[str, Preload], topology: Topology) -> dict[str, Preload]:
    """Return the same preloads, those of models with the variables of torch's allocator.

    Replicas map memory of the policy's ranks if weights travel by `ipc`. What generation allocates is its engine's
    decision.

    Args:
        preloads: Preload of each role.
        topology: Devices of the run.
    """

    def allocating(role: str, preload: Preload) -> Preload:
        shares_memory = role in (POLICY, DRAFTER) and topology.transport_of(role) == "ipc"
        chosen = topology.device.allocator_variables(shares_memory=shares_memory)
        return replace(preload, variables={**chosen, **preload.variables})

    return {role: preload if role == GENERATION else allocating(role, preload) for role, preload in preloads.items()}


@dataclass(frozen=True)
class NsysReports:
    """Workers that are started under Nsight Systems, which records them from `cudaProfilerStart` to `cudaProfilerStop`.

    Args:
        folder: Folder of the reports.
        ranks: Ranks of models, and numbers of generators.
    """

    folder: Path
    ranks: frozenset[int]

    def command(self, python: str, name: str) -> str:
        """Return the command that stands in for `python`, quoted for a shell.

        Args:
            python: Interpreter of the worker.
            name: Name of the report.
        """
        # nsys does not make it
        self.folder.mkdir(parents=True, exist_ok=True)
        options = {
            "trace": "cuda,nvtx,osrt,cudnn,cublas",
            "sample": "none",
            "cpuctxsw": "none",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": "stop",
            "trace-fork-before-exec": "true",
            "force-overwrite": "true",
            "output": str(self.folder / name),
        }
        return shlex.join(["nsys", "profile", *(f"--{key}={value}" for key, value in options.items()), python])


class Processes:
    """Processes of workers, on nodes that are prepared for them.

    Args:
        cluster: The started cluster.
        nodes: Nodes of the run.
        env_vars: Environment variables for workers of every role.
        env_vars_by_role: Environment variables for those of one role.
        preloads: What workers of one role import in any case.
        fork_server_s: `cluster.fork_server_s`.
        nsys: Workers that Nsight Systems records; None for none.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        nodes: Nodes,
        *,
        env_vars: EnvVars,
        env_vars_by_role: Mapping[str, EnvVars],
        preloads: Mapping[str, Preload],
        fork_server_s: float | None,
        nsys: NsysReports | None = None,
    ) -> None:
        self._nsys = nsys
        self._cluster = cluster
        self._nodes = nodes
        self._env_vars = env_vars
        self._env_vars_by_role = dict(env_vars_by_role)
        self._preloads = dict(preloads)
        self._fork_server_s = server_stay_s(fork_server_s, cluster.device)

    def prepare(self, roles: Iterable[tuple[str, str]]) -> None:
        """Prepare nodes for workers, before the first of them is started there.

        Args:
            roles: Ray's id of a node, and a role of workers that will be on it.
        """
        by_node: dict[str, list[str]] = {}
        for node, role in roles:
            by_node.setdefault(node, []).append(role)
        self._nodes.prepare(by_node)

    def leave(self, node: str, roles: Iterable[str]) -> None:
        """Note that the run has no workers of these roles on a node any more."""
        self._nodes.leave(node, roles)

    def cores(self, node: str) -> int:
        """Cores of a prepared node."""
        return self._nodes[node].facts.cores

    def on(
        self, node: str, role: str, *, num_gpus: float = 0, ranks: int = 1, number: int | None = None, name: str = ""
    ) -> WorkerProcess:
        """A process on a prepared node.

        Args:
            node: Ray's id of the node.
            role: Role of the worker.
            num_gpus: Share of a GPU, or number of GPUs, that Ray gives it.
            ranks: Number of processes that share the cores of the node.
            number: Rank of the model, or number of the generator; None for a worker that cannot be profiled.
            name: Name of a worker that has a number.
        """
        found = self._nodes[node]
        python = found.interpreters[role]
        preload = self._preloads.get(role, Preload())
        of_worker = variables_of_worker(
            python,
            preload,
            self._cluster.device,
            self._env_vars,
            self._env_vars_by_role.get(role, {}),
            num_threads=max(1, found.facts.cores // ranks),
        )
        # what the user chose wins over the node's network
        variables = {**(self._cluster.network_variables or found.network_variables), **of_worker}
        if self._nsys is not None and number in self._nsys.ranks:
            # a process that a server forks would be none of nsys's
            command = self._nsys.command(python, name)
        else:
            command = shell_command(python, preload.modules, self._fork_server_s)
        return WorkerProcess(command, variables, node, num_gpus)
