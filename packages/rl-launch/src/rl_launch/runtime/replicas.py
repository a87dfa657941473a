"""The replicas of a run: their places and their start."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ray.actor import ActorHandle

from rl_algos.rollouts.worker.opponents import OpponentSpec
from rl_algos.rollouts.worker.worker import RolloutWorkerSpec
from rl_core.environments.instance import instance_of
from rl_core.errors import Origin, RLError
from rl_core.plugins import OpponentNeed, RolloutNeeds
from rl_core.ray.calls import gather
from rl_core.ray.environment import RemoteEnvironment
from rl_core.ray.host import Place
from rl_core.rollouts.generation import Placement
from rl_launch.backends import GenerationBackend
from rl_launch.cluster.start_wait import gather_start
from rl_launch.cluster.virtual_cluster import Bundle, VirtualCluster, WorkerProcess
from rl_launch.monitoring.poller import Monitored
from rl_launch.placement.topology import GENERATION, Topology
from rl_launch.runtime.environment_watch import EnvironmentWatch
from rl_launch.runtime.model_group import StartTimeouts
from rl_launch.runtime.processes import Processes
from rl_launch.runtime.replica import Replica, name_of
from rl_launch.runtime.role_envs import environment_role

_log = logging.getLogger(__name__)

ENVIRONMENT_POOL = "rl_core.environments.pool:EnvironmentPool.of"

Start = tuple[Callable[[int], ActorHandle], Placement]
"""How an empty rollout worker is started, by its number, and where its engine runs."""


class Replicas:
    """All rollout workers of a run with their replicas, and the environments that they call.

    Args:
        backend: Backend of generation.
        needs: The needs of the rollout workers.
        environments: Settings of environments by name: the section `env`.
        topology: Devices of the run.
        cluster: The started cluster.
        processes: Processes of the workers.
        logs: Folder of their logs.
        timeouts: Startup timeouts.
        stack: Closes the environments and gives devices back.
        reports_load: True if somebody reads the load of the engines.
    """

    def __init__(
        self,
        backend: GenerationBackend,
        needs: RolloutNeeds,
        environments: Any,
        topology: Topology,
        cluster: VirtualCluster,
        processes: Processes,
        *,
        logs: str,
        timeouts: StartTimeouts,
        stack: ExitStack,
        reports_load: bool = False,
    ) -> None:
        self._backend = backend
        self._needs = needs
        self._settings = environments
        self._topology = topology
        self._cluster = cluster
        self._processes = processes
        self._logs = logs
        self._timeouts = timeouts
        self._stack = stack
        self._reports_load = reports_load
        self._bundles: list[Bundle] = []
        self._environments: dict[str, RemoteEnvironment] = {}
        self._environment_actors: dict[str, ActorHandle] = {}
        self._environment_logs: dict[str, str] = {}
        self._environment_deadlines: dict[str, float] = {}
        self._environment_nodes: dict[str, str] = {}
        self._devices: dict[Replica, Bundle] = {}
        self._nodes: dict[Replica, str] = {}

    def reserve(self) -> None:
        """Allocate devices for replicas only."""
        topology = self._topology
        self._bundles = self._cluster.reserve_replicas(
            topology.num_replicas, topology.replica_resources, least=topology.fewest_replicas
        )
        self._stack.callback(lambda: self._cluster.release([[bundle] for bundle in self._bundles]))

    def roles(self, beside: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Ray's id of a node, and the role of a worker on it.

        Args:
            beside: Nodes of the policy: of the devices that replicas share if they have none of their own, and of the
                environments if the nodes of replicas may be lost.
        """
        for node in [bundle.node for bundle in self._bundles] or beside:
            for role in self._roles:
                yield node, role
        if self._topology.is_elastic:
            for name in sorted(self._needs.environments):
                yield beside[0], environment_role(name)

    def begin_beside(self, places: Sequence[Place]) -> Callable[[], list[Replica]]:
        """Start replicas next to the policy's ranks, on the GPUs that Ray assigned to the ranks. See `begin_alone`."""
        starts: list[Start] = []
        ranks = self._topology.devices(GENERATION).ranks
        for first in range(0, len(places), ranks):
            here = places[first : first + ranks]
            node = here[0].node
            start = partial(self._start_in, node)
            starts += [(start, placement) for placement in self._shared([g for p in here for g in p.gpus], node)]
        return self._begin(starts, places[0].node)

    def begin_alone(self, beside: str = "", *, awaits_weights: bool) -> Callable[[], list[Replica]]:
        """Start replicas on their own devices, and environments. The returned function waits until they are ready.

        Args:
            beside: A node of the policy, on which environments run if the nodes of replicas may be lost.
            awaits_weights: True if a policy will send them weights before they generate.
        """
        starts = [self._start_alone(bundle, bundle.node, awaits_weights=awaits_weights) for bundle in self._bundles]
        finish = self._begin(starts, beside if self._topology.is_elastic else self._bundles[0].node)

        def finish_alone() -> list[Replica]:
            replicas = finish()
            self._devices = dict(zip(replicas, self._bundles, strict=True))
            self._nodes = {replica: bundle.node for replica, bundle in self._devices.items()}
            return replicas

        return finish_alone

    def request(self) -> Bundle:
        """Ask the cluster for the devices of one more replica, without waiting."""
        bundle = self._cluster.request_replica(self._topology.replica_resources)
        self._bundles.append(bundle)
        return bundle

    def is_granted(self, devices: Bundle) -> bool:
        """Return whether the cluster has placed requested devices."""
        return self._cluster.is_placed(devices)

    def begin_on(self, devices: Bundle) -> tuple[Replica, Callable[[], None]]:
        """Begin to start a replica on granted devices, on a node that is prepared for it first; the returned function
        waits until it is ready.

        Raises:
            RLError: If its node cannot be prepared.
        """
        node = self._cluster.node_of(devices)
        self._processes.prepare((node, role) for role in self._roles)
        start, placement = self._start_alone(devices, node, awaits_weights=True)
        taken = {replica.index for replica in self._devices}
        index = next(index for index in itertools.count() if index not in taken)
        replica = self._replica(start, placement, index)
        self._devices[replica] = devices
        self._nodes[replica] = node
        return replica, replica.begin_start()

    def give_back(self, devices: Bundle) -> None:
        """Release devices on which no replica has been started."""
        self._bundles.remove(devices)
        self._cluster.release([[devices]])

    def discard(self, replica: Replica) -> None:
        """End a replica's process and release its devices; the loss of a node without replicas is none of the run's."""
        replica.kill()
        self.give_back(self._devices.pop(replica))
        node = self._nodes.pop(replica)
        if node not in self._nodes.values():
            self._processes.leave(node, self._roles)

    def environment_watch(self) -> EnvironmentWatch:
        """Return the watch over the processes of the environments that have been started."""
        return EnvironmentWatch(self._environment_actors, self._environment_logs, self._environment_deadlines)

    def monitored_environments(self) -> list[Monitored]:
        """The processes of the environments, for readings."""
        return [
            Monitored(f"environment-{_file_name(label)}", "environment", 0, self._environment_nodes[label], actor)
            for label, actor in self._environment_actors.items()
        ]

    @property
    def _roles(self) -> list[str]:
        """Roles of the workers on a node that generates."""
        return [GENERATION, *map(environment_role, sorted(self._needs.environments))]

    def _begin(self, starts: Sequence[Start], host: str) -> Callable[[], list[Replica]]:
        self._environments = {name: self._environment(name, host) for name in sorted(self._needs.environments)}
        replicas = [self._replica(start, placement, index) for index, (start, placement) in enumerate(starts)]
        waits = [replica.begin_start() for replica in replicas]

        def finish() -> list[Replica]:
            for wait in waits:
                wait()
            return replicas

        return finish

    def _start_alone(self, bundle: Bundle, node: str, *, awaits_weights: bool) -> Start:
        """The start of a replica on its own devices; its GPUs are those that Ray shows its process."""
        threads = self._processes.cores(node) // (2 * self._topology.replica_ranks) or 1
        placement = Placement(self._topology.device.name, (), threads, awaits_weights=awaits_weights)
        return partial(self._start_on, bundle), placement

    def _replica(self, start: Callable[[int], ActorHandle], placement: Placement, index: int) -> Replica:
        spec = self._spec(placement)
        return Replica(
            partial(start, index), spec, self._environments, index=index, logs=self._logs, timeouts=self._timeouts
        )

    def _spec(self, placement: Placement) -> RolloutWorkerSpec:
        backend = self._backend
        config = backend.config
        placement = replace(placement, reports_load=self._reports_load, num_engines=1 + len(self._needs.opponents))
        opponents = tuple(self._opponent(need, placement) for need in self._needs.opponents)
        if placement.awaits_weights:
            placement = replace(placement, reports_routing=backend.reports_routing, keeps_cache=self._needs.keeps_cache)
        else:
            # an evaluation, which trains nothing, serves whole weights from files
            config = config.model_copy(update={"lora_sync": "merged"})
        return RolloutWorkerSpec(
            generator=backend.plugin.worker,
            generator_args=(config, backend.backend, backend.model, placement),
            program=self._needs.program,
            program_args=self._needs.program_args,
            tokenizer=backend.model.tokenizer,
            model_name=backend.model.model_name,
            max_seconds=self._needs.max_seconds,
            max_steps=self._needs.max_steps,
            logs=self._logs,
            opponents=opponents,
            vision=backend.model.vision,
        )

    def _opponent(self, need: OpponentNeed, placement: Placement) -> OpponentSpec:
        """An engine next to the policy's, with whole weights that come from files."""
        backend, model = self._backend, self._backend.model
        if need.model_name is not None:
            tokenizer = model.tokenizer.model_copy(update={"name": model.tokenizer.name or model.model_name})
            model = model.model_copy(update={"model_name": need.model_name, "tokenizer": tokenizer})
        own = replace(placement, awaits_weights=need.model_name is None, keeps_weights=True)
        config = backend.config.model_copy(update={"lora_sync": "merged"})
        return OpponentSpec(need, (config, backend.backend, model, own))

    def _start_in(self, node: str, index: int) -> ActorHandle:
        """A replica's process next to the policy's."""
        return self._cluster.start_async_worker(self._process(node, index))

    def _process(self, node: str, index: int, num_gpus: float = 0) -> WorkerProcess:
        return self._processes.on(node, GENERATION, num_gpus=num_gpus, number=index, name=name_of(index))

    def _start_on(self, bundle: Bundle, index: int) -> ActorHandle:
        """A replica's process on its own devices, on another node if Ray has moved them."""
        node = self._cluster.node_of(bundle)
        self._processes.prepare((node, role) for role in self._roles)
        num_gpus = self._topology.device.num_gpus(self._topology.replica_ranks)
        return self._cluster.start_async_worker(self._process(node, index, num_gpus), bundle=bundle)

    def _shared(self, gpus: Sequence[str], node: str) -> list[Placement]:
        """Return the placements of the replicas of one node, next to the policy."""
        device, ranks = self._topology.device, self._topology.replica_ranks
        if not device.has_gpus:
            return [Placement(device.name, (), self._processes.cores(node) // ranks or 1, awaits_weights=True)]
        shared = Placement(device.name, shares_devices=True, awaits_weights=True)
        return [replace(shared, gpus=tuple(gpus[i : i + ranks])) for i in range(0, len(gpus), ranks)]

    def _environment(self, name: str, node: str) -> RemoteEnvironment:
        instance = instance_of(self._settings, name)
        log = f"{self._logs}/environment-{_file_name(instance.label)}.log"
        actor = self._cluster.start_restarting_worker(
            self._processes.on(node, environment_role(name)),
            log,
            f"environment {instance.label}",
            ENVIRONMENT_POOL,
            instance.environment,
            instance.config,
            instance.label,
        )
        origin = Origin(f"environment {instance.label}", 0, "its node", "start")
        awaited = f"environment {instance.label}"
        gather_start([actor.call.remote("health")], [origin], self._timeouts.process, awaited)
        self._stack.callback(partial(_close_environment, actor, origin))
        self._environment_actors[instance.label], self._environment_logs[instance.label] = actor, log
        self._environment_nodes[instance.label] = node
        self._environment_deadlines[instance.label] = instance.config.deadline_s
        return RemoteEnvironment(actor, name=instance.label)


def _file_name(label: str) -> str:
    """A label as part of a file name: `reward.score` for `reward.py:score`."""
    return re.sub(r"[^\w.-]", "_", label.replace(".py:", "."))


def _close_environment(actor: ActorHandle, origin: Origin) -> None:
    try:
        gather([actor.call.remote("close")], [origin], 30.0)
    except RLError as error:
        _log.warning("%s", error)
