"""A run's processes: from a resolved config to the objects an algorithm is handed."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ray.actor import ActorHandle

from rl_algos.rollouts.worker import RolloutWorkerSpec
from rl_core.devices import Device
from rl_core.errors import ConfigError, Origin, RLError
from rl_core.generation import Placement
from rl_core.plugins import ENVIRONMENTS, EnvironmentPlugin, RolloutNeeds, plugin
from rl_core.ray.calls import gather
from rl_core.ray.environment import RemoteEnvironment
from rl_core.ray.model import RemoteModel
from rl_core.run import Components
from rl_launch.backends import POLICY, Backends
from rl_launch.cluster.nodes import Nodes
from rl_launch.cluster.start_wait import gather_start
from rl_launch.cluster.virtual_cluster import Bundle, VirtualCluster, WorkerProcess
from rl_launch.local_models import model_folders
from rl_launch.placement.residency import Residency, Tenant
from rl_launch.placement.topology import GENERATION, Topology, plan
from rl_launch.runtime.model_group import ModelGroup, StartTimeouts
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.role_envs import role_specs
from rl_launch.runtime.rollout_pool import RolloutPool
from rl_launch.runtime.weight_sync import Canary, WeightSync
from rl_launch.worker_envs import chosen_variables, worker_variables
from rl_launch.worker_envs.driver_envs import DriverEnvs
from rl_launch.worker_envs.engine_checks import engine_problems

_log = logging.getLogger(__name__)

Hold = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a tenant has the devices that it shares."""

Start = tuple[Callable[[], ActorHandle], Placement]
"""How an empty rollout worker is started, and where its engine runs."""

ENVIRONMENT_POOL = "rl_core.environments.pool:EnvironmentPool.of"


def provision_workers(config: Any, backends: Backends, needs: RolloutNeeds | None, device: Device) -> DriverEnvs:
    """Environments on this node for every kind of worker the run has.

    Raises:
        WorkerEnvironmentError: if one cannot be had.
    """
    wanted = role_specs(backends, needs.environments if needs else (), device)
    return DriverEnvs.provided(wanted, config.cluster.worker_envs)


def check_engines(config: Any, backends: Backends, envs: DriverEnvs) -> None:
    """Run the backends' own checks of the config in their workers' environments, before a process of the run is
    started.

    Raises:
        ConfigError: listing every problem.
    """
    chosen = {role: model.plugin for role, model in backends.models.items()}
    if backends.generation is not None:
        chosen[GENERATION] = backends.generation.plugin
    checks = [(envs.interpreters[role], found.preflight) for role, found in chosen.items() if found.preflight]
    with ThreadPoolExecutor(max_workers=2) as threads:
        found = list(threads.map(lambda check: engine_problems(check[0], check[1], config), checks))
    problems = [problem for several in found for problem in several]
    if problems:
        raise ConfigError("\n".join(problems))


class Runtime:
    """Starts what a run needs on a cluster, and ends all of it.

    Args:
        config: resolved root.
        backends: the policy's and the generator's.
        envs: environments of the workers on the driver's node.
        cluster: started.
        logs: folder for the workers' logs.
    """

    def __init__(self, config: Any, backends: Backends, envs: DriverEnvs, cluster: VirtualCluster, logs: Path) -> None:
        self._config = config
        self._backends = backends
        self._cluster = cluster
        self._nodes = Nodes(
            envs,
            logs,
            model_folders=model_folders(config.policy),
            answer_timeout_s=config.cluster.process_timeout_s,
            build_timeout_s=config.cluster.worker_envs_timeout_s,
        )
        self._policy_bundles: list[list[Bundle]] = []
        self._replica_bundles: list[list[Bundle]] = []
        self._logs = str(logs)
        self._timeouts = StartTimeouts(config.cluster.process_timeout_s, config.cluster.start_timeout_s)
        self._exit = ExitStack()
        self._residency = Residency()
        generation = backends.generation
        self._topology = plan(
            num_nodes=cluster.num_nodes,
            ranks_per_node=cluster.ranks_per_node,
            device=cluster.device,
            generation=generation.config if generation else None,
            replica_ranks=generation.plugin.ranks(generation.backend) if generation else 1,
        )

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def topology(self) -> Topology:
        """Devices of the run."""
        return self._topology

    def lost_nodes(self) -> list[str]:
        """Addresses of the run's nodes that are lost, once Ray knows it too."""
        return self._nodes.lost()

    def components(self, data: Any, needs: RolloutNeeds | None, vocabulary: int) -> Components:
        """Start everything the algorithm needs.

        Args:
            data: what its `prepare` returned.
            needs: what its rollout workers run, where it generates.
            vocabulary: number of tokens the canary may draw from.
        """
        if needs is None:
            return Components(models={POLICY: self.policy()}, data=data)
        self._reserve_policy()
        if not self._topology.colocated:
            self._reserve_replicas()
        self._prepare_nodes(needs)
        group = self._begin_policy()
        if self._topology.shares_devices:
            policy = self._finish_policy(group, self._hold(POLICY))
            policy.offload()
            replicas = self._start_replicas(self._replica_starts(group, needs), needs)
        else:
            finish = self._begin_replicas(self._replica_starts(group, needs), needs)
            policy = self._finish_policy(group, nullcontext)
            replicas = finish()
        sync = self._weight_sync(policy, group, vocabulary)
        if self._topology.shares_devices:
            self._residency.join(POLICY, Tenant(policy.offload, policy.onload))
        pool = self._pool(replicas, self._residency if self._topology.shares_devices else None)
        return Components(models={POLICY: policy}, data=data, weights=sync, pool=pool)

    def policy(self) -> RemoteModel:
        """The policy alone; it shares its devices with nobody."""
        self._reserve_policy()
        self._prepare_nodes(None)
        return self._finish_policy(self._begin_policy(), nullcontext)

    def evaluation_pool(self, needs: RolloutNeeds) -> RolloutPool:
        """Replicas alone, serving the weights at `policy.model_name`."""
        self._reserve_replicas()
        self._prepare_nodes(needs)
        return self._pool(self._start_replicas(self._separate_starts(needs, awaits_weights=False), needs), None)

    def _reserve_policy(self) -> None:
        topology = self._topology
        self._policy_bundles = self._cluster.reserve(topology.policy_nodes, topology.policy_ranks)
        self._exit.callback(self._cluster.release, self._policy_bundles)

    def _reserve_replicas(self) -> None:
        """Devices for replicas alone."""
        topology = self._topology
        ranks = topology.replica_ranks if topology.device.has_gpus else topology.generation_ranks
        count = topology.generation_nodes * topology.replicas_per_node
        self._replica_bundles = self._cluster.reserve_replicas(count, ranks)
        self._exit.callback(self._cluster.release, self._replica_bundles)

    def _prepare_nodes(self, needs: RolloutNeeds | None) -> None:
        """Prepare every node that was reserved, before the first worker is started."""
        roles: dict[str, list[str]] = {}
        for bundles in self._policy_bundles:
            roles.setdefault(bundles[0].node, []).append(POLICY)
        if needs is not None:
            for bundles in self._replica_bundles or self._policy_bundles:
                roles.setdefault(bundles[0].node, []).extend(_rollout_roles(needs))
        self._nodes.prepare(roles)

    def _pool(self, replicas: list[Replica], residency: Residency | None) -> RolloutPool:
        assert self._backends.generation is not None, "rollouts need generation"
        pool = RolloutPool(
            replicas,
            residency,
            stall_timeout_s=self._backends.generation.config.stall_timeout_s,
        )
        self._exit.callback(pool.close)
        return pool

    def _place_policy(self) -> ModelGroup:
        topology = self._topology
        gpus = topology.device.num_gpus(1)
        return ModelGroup(
            self._cluster,
            self._policy_bundles,
            partial(self._process, POLICY, num_gpus=gpus, ranks=topology.policy_ranks),
            role=POLICY,
            logs=self._logs,
            timeouts=self._timeouts,
        )

    def _begin_policy(self) -> ModelGroup:
        backend = self._backends.models[POLICY]
        group = self._place_policy()
        group.begin(backend.plugin, backend.config, backend.backend, backend.spec)
        return group

    def _finish_policy(self, group: ModelGroup, hold: Hold) -> RemoteModel:
        policy = group.finish(hold)
        self._exit.callback(policy.close)
        return policy

    def _hold(self, tenant: str) -> Hold:
        return partial(self._residency.hold, tenant) if self._topology.shares_devices else nullcontext

    def _weight_folders(self) -> Callable[[], str]:
        """Give out folders for the weights that travel through files; nothing in them outlasts the run."""
        folder = Path(self._logs).parent / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        numbers = itertools.count(1)
        return lambda: str(folder / str(next(numbers)))

    def _weight_sync(self, policy: RemoteModel, group: ModelGroup, vocabulary: int) -> WeightSync:
        kind = self._topology.transport
        return WeightSync(
            policy,
            kind=kind,
            meet=group.meeting_point if kind != "disk" else self._weight_folders(),
            canary=Canary.of(
                vocabulary,
                precision=self._backends.models[POLICY].config.precision,
                tolerance=self._backends.generation.config.canary_tolerance if self._backends.generation else None,
            ),
            residency=self._residency if self._topology.shares_devices else None,
            bucket_bytes=self._topology.device.bucket_bytes,
        )

    def _replica_starts(self, policy: ModelGroup, needs: RolloutNeeds) -> list[Start]:
        if self._topology.colocated:
            return self._colocated_starts(policy)
        return self._separate_starts(needs, awaits_weights=True)

    def _start_replicas(self, starts: list[Start], needs: RolloutNeeds) -> list[Replica]:
        return self._begin_replicas(starts, needs)()

    def _begin_replicas(self, starts: list[Start], needs: RolloutNeeds) -> Callable[[], list[Replica]]:
        """Begin to start replicas and environments; the returned function waits until they are ready."""
        backend = self._backends.generation
        assert backend is not None, "rollouts need generation"
        model = backend.model
        host = (self._replica_bundles or self._policy_bundles)[0][0].node
        environments = {name: self._start_environment(name, host) for name in sorted(needs.environments)}
        replicas = []
        for index, (start, placement) in enumerate(starts):
            spec = RolloutWorkerSpec(
                generator=backend.plugin.worker,
                generator_args=(backend.config, backend.backend, model, placement),
                program=needs.program,
                program_args=needs.program_args,
                tokenizer=model.tokenizer,
                model_name=model.model_name,
            )
            replica = Replica(start, spec, environments, index=index, logs=self._logs, timeouts=self._timeouts)
            replicas.append(replica)
        waits = [replica.begin_start() for replica in replicas]

        def finish() -> list[Replica]:
            for wait in waits:
                wait()
            return replicas

        return finish

    def _colocated_starts(self, policy: ModelGroup) -> list[Start]:
        """Beside the policy's ranks, node by node, on the GPUs that Ray gave those."""
        starts: list[Start] = []
        for first in range(0, len(policy.places), self._topology.policy_ranks):
            places = policy.places[first : first + self._topology.policy_ranks]
            node = places[0].node
            gpus = [gpu for place in places for gpu in place.gpus]
            process = self._process(GENERATION, node, num_gpus=0, ranks=1)
            start = partial(self._cluster.start_async_worker, process)
            starts += [(start, placement) for placement in self._placements(gpus, node)]
        return starts

    def _separate_starts(self, needs: RolloutNeeds, *, awaits_weights: bool) -> list[Start]:
        """On devices of their own: a replica's actor takes its GPUs from Ray."""
        starts: list[Start] = []
        for (bundle,) in self._replica_bundles:
            # its GPUs are those that Ray shows its process
            threads = self._nodes[bundle.node].facts.cores // (2 * self._topology.replica_ranks) or 1
            placement = Placement(self._topology.device.name, (), threads, awaits_weights=awaits_weights)
            starts.append((partial(self._start_on, bundle, needs), placement))
        return starts

    def _start_on(self, bundle: Bundle, needs: RolloutNeeds) -> ActorHandle:
        """A replica's process on its own devices, on another node if Ray has placed them anew."""
        node = self._cluster.node_of(bundle)
        self._nodes.prepare({node: _rollout_roles(needs)})
        ranks = self._topology.replica_ranks
        process = self._process(GENERATION, node, num_gpus=self._topology.device.num_gpus(ranks), ranks=1)
        return self._cluster.start_async_worker(process, bundle=bundle)

    def _placements(self, gpus: list[str], node: str) -> list[Placement]:
        topology = self._topology
        ranks = topology.replica_ranks
        if not topology.device.has_gpus:
            threads = self._nodes[node].facts.cores // ranks or 1
            return [Placement(topology.device.name, (), threads, awaits_weights=True)]
        shared = Placement(topology.device.name, shares_devices=topology.shares_devices, awaits_weights=True)
        return [replace(shared, gpus=tuple(gpus[i : i + ranks])) for i in range(0, len(gpus), ranks)]

    def _start_environment(self, name: str, node: str) -> RemoteEnvironment:
        found: EnvironmentPlugin = plugin(ENVIRONMENTS, name)
        settings = getattr(self._config.env, name)
        actor = self._cluster.start_restarting_worker(
            self._process(f"env.{name}", node, num_gpus=0, ranks=1),
            f"{self._logs}/environment-{name}.log",
            f"environment {name}",
            ENVIRONMENT_POOL,
            found.environment,
            settings,
            name,
        )
        origin = Origin(f"environment {name}", 0, "its node", "start")
        gather_start([actor.call.remote("health")], [origin], self._timeouts.process, f"environment {name}")
        self._exit.callback(partial(_close_environment, actor, origin))
        return RemoteEnvironment(actor, name=name)

    def _process(self, role: str, node: str, *, num_gpus: float, ranks: int) -> WorkerProcess:
        """A process on a prepared node, where as many ranks share the cores."""
        found = self._nodes[node]
        python = found.interpreters[role]
        variables = {
            **worker_variables(python),
            **(self._cluster.network_variables or found.network_variables),
            **self._topology.device.worker_variables(max(1, found.facts.cores // ranks)),
            **chosen_variables(self._config.cluster.env_vars, self._env_vars_of(role)),
        }
        return WorkerProcess(python, variables, node, num_gpus)

    def _env_vars_of(self, role: str) -> Mapping[str, str]:
        if role in self._backends.models:
            return self._backends.models[role].config.env_vars
        generation = self._backends.generation
        return generation.config.env_vars if role == GENERATION and generation else {}


def _rollout_roles(needs: RolloutNeeds) -> list[str]:
    """Roles of the workers on a node that generates."""
    return [GENERATION, *(f"env.{name}" for name in sorted(needs.environments))]


def _close_environment(actor: ActorHandle, origin: Origin) -> None:
    try:
        gather([actor.call.remote("close")], [origin], 30.0)
    except RLError as error:
        _log.warning("%s", error)
