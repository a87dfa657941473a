"""The processes of a run's workers: their environments, the checks in these, and how they are made."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_core.config import EnvVars
from rl_core.devices import Device
from rl_core.environments.instance import instance_of
from rl_core.errors import ConfigError
from rl_core.fork_server import IDLE_S, shell_command
from rl_core.plugins import Preload, RolloutNeeds
from rl_launch.backends import Backend
from rl_launch.cluster.node_task import usable_cores
from rl_launch.cluster.nodes import Nodes
from rl_launch.cluster.start_wait import REPORT_S, Bound, busy
from rl_launch.cluster.virtual_cluster import VirtualCluster, WorkerProcess
from rl_launch.placement.topology import GENERATION, Topology
from rl_launch.root_config import DRAFTER, POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.runtime.role_envs import role_specs
from rl_launch.worker_envs.engine_checks import engine_problems
from rl_launch.worker_envs.provision import DriverEnvs
from rl_launch.worker_envs.variables import chosen_variables, worker_variables

_log = logging.getLogger(__name__)


def server_stay_s(chosen: float | None, device: Device) -> float:
    """Return the seconds that a fork server of workers stays without work; 0 for none.

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
        preload: Modules and variables of its backend.
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
    """Return the same preloads, for models with the variables of torch's allocator.

    Replicas map memory of the policy's ranks if weights travel by `ipc`. The engine of generation chooses its own
    allocator.

    Args:
        preloads: Preload of each role.
        topology: Devices of the run.
    """
    found = dict(preloads)
    for role in found.keys() - {GENERATION}:
        shares_memory = role in (POLICY, DRAFTER) and topology.transport_of(role) == "ipc"
        chosen = topology.device.allocator_variables(shares_memory=shares_memory)
        found[role] = replace(found[role], variables={**chosen, **found[role].variables})
    return found


def provision_workers(plan: RunPlan, needs: RolloutNeeds | None, device: Device) -> DriverEnvs:
    """Provide environments on this node for every kind of worker the run has.

    Raises:
        WorkerEnvironmentError: If one is unavailable.
    """
    environments = [instance_of(plan.config.env, name) for name in needs.environments] if needs else ()
    wanted = role_specs(plan.backends, environments, device)
    return DriverEnvs.provided(wanted, plan.config.cluster.worker_envs)


def check_engines(plan: RunPlan, envs: DriverEnvs, device: Device) -> None:
    """Run the backends' own checks of the config in their workers' environments, before a process of the run is
    started.

    Raises:
        ConfigError: If there are problems; lists all of them.
    """
    _log.info("checking models and engines in their environments")
    backends, cluster = plan.backends, plan.config.cluster
    preloads = backends.preloads(device)
    fork_server_s = server_stay_s(cluster.fork_server_s, device)
    cores, ranks = usable_cores(), device.ranks_per_node(cluster)

    def problems_of(role: str, chosen: Backend[Any]) -> list[str]:
        if not chosen.plugin.preflight:
            return []
        python, preload = envs.interpreters[role], preloads[role]
        # A worker has the same variables, so that both are forked from the same process.
        num_threads = cores if role == GENERATION else max(1, cores // ranks)
        own = (cluster.env_vars, chosen.config.env_vars)
        variables = variables_of_worker(python, preload, device, *own, num_threads=num_threads)
        options: Any = {"variables": variables, "imports": preload.modules, "fork_server_s": fork_server_s}
        found = engine_problems(python, chosen.plugin.preflight, plan.section(chosen.section), **options)
        return [f"{chosen.section}.{text}" for text in found]

    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as threads:
        answers = {threads.submit(problems_of, *each): each[0] for each in backends.by_role.items()}
        while waiting := wait(answers, REPORT_S).not_done:
            roles = ", ".join(role for answer, role in answers.items() if answer in waiting)
            _log.info("still checking after %.0f s: %s%s", time.monotonic() - begun, roles, busy())
    if problems := [problem for answer in answers for problem in answer.result()]:
        raise ConfigError("\n".join(problems))


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
        """Return the command that replaces `python`, quoted for a shell.

        Args:
            python: Interpreter of the worker.
            name: Name of the report.
        """
        # nsys does not make the folder.
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


class StartTimeouts:
    """Timeouts of the start of workers, with their keys.

    Args:
        process_s: Timeout in seconds of an empty process.
        model_s: Timeout in seconds of building and loading a model.
    """

    def __init__(self, process_s: float, model_s: float) -> None:
        self.process = Bound(process_s, "cluster.process_timeout_s")
        self.model = Bound(model_s, "cluster.start_timeout_s")


class Processes:
    """Processes of workers, on nodes that are prepared for them.

    Args:
        cluster: The started cluster.
        nodes: Nodes of the run.
        topology: Devices of the run.
        logs: Folder of the workers' logs.
        timeouts: Startup timeouts.
        env_vars: Environment variables for workers of every role.
        env_vars_by_role: Environment variables for workers of one role.
        preloads: Modules that workers of one role import in any case.
        fork_server_s: `cluster.fork_server_s`.
        nsys: Workers that Nsight Systems records; None for none.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        nodes: Nodes,
        topology: Topology,
        *,
        logs: str,
        timeouts: StartTimeouts,
        env_vars: EnvVars,
        env_vars_by_role: Mapping[str, EnvVars],
        preloads: Mapping[str, Preload],
        fork_server_s: float | None,
        nsys: NsysReports | None = None,
    ) -> None:
        self._nsys = nsys
        self.cluster, self.topology, self.logs, self.timeouts = cluster, topology, logs, timeouts
        self.nodes = nodes
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
        self.nodes.prepare(by_node)

    def cores(self, node: str, ranks: int) -> int:
        """Return the cores of a prepared node that belong to so many of its ranks, at least one."""
        return self.nodes[node].facts.cores * ranks // self.cluster.ranks_per_node or 1

    def on(
        self,
        node: str,
        role: str,
        *,
        num_gpus: float = 0,
        shares_cores: bool = False,
        number: int | None = None,
        name: str = "",
    ) -> WorkerProcess:
        """Return a process on a prepared node.

        Args:
            node: Ray's id of the node.
            role: Role of the worker.
            num_gpus: Share of a GPU, or number of GPUs, that Ray gives it.
            shares_cores: True if it computes on its part of the node's cores, which all ranks of the node share.
            number: Rank of the model, or number of the generator; None for a worker that cannot be profiled.
            name: Name of a worker that has a number.
        """
        found = self.nodes[node]
        python = found.interpreters[role]
        preload = self._preloads.get(role, Preload())
        of_worker = variables_of_worker(
            python,
            preload,
            self.cluster.device,
            self._env_vars,
            self._env_vars_by_role.get(role, {}),
            num_threads=self.cores(node, 1) if shares_cores else found.facts.cores,
        )
        # The user's variables win over the node's network.
        variables = {**(self.cluster.network_variables or found.network_variables), **of_worker}
        if self._nsys is not None and number in self._nsys.ranks:
            # nsys would not see a process that a server forks.
            command = self._nsys.command(python, name)
        else:
            command = shell_command(python, preload.modules, self._fork_server_s)
        return WorkerProcess(command, variables, node, num_gpus)
