"""The replicas of a run: their places and their start."""

from __future__ import annotations

import itertools
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from rl_algos.rollouts.worker.opponents import OpponentSpec
from rl_algos.rollouts.worker.worker import RolloutWorkerSpec
from rl_core.environments.instance import instance_of
from rl_core.errors import FailureOrigin, RLError
from rl_core.model_config import TokenizerConfig, VisionConfig
from rl_core.plugins import OpponentNeed, RolloutNeeds
from rl_core.ray.calls import fetch, gather, wait
from rl_core.ray.environment import RemoteEnvironment
from rl_core.ray.host import Place
from rl_core.ray.judges import RemoteJudges
from rl_core.rollouts.generation import Placement
from rl_core.tracing import spans
from rl_launch.backends import GenerationBackend
from rl_launch.cluster.start_wait import gather_start
from rl_launch.cluster.virtual_cluster import Bundle, WorkerProcess
from rl_launch.monitoring.poller import Monitored
from rl_launch.placement.topology import GENERATION
from rl_launch.run_session.traces.step_trace import RESTARTS
from rl_launch.runtime.judges import JUDGE_HOST, JUDGES, host_spec, judging_spec, longest_judged
from rl_launch.runtime.processes import Processes
from rl_launch.runtime.replica import Follower, Replica, name_of
from rl_launch.runtime.role_envs import environment_role

_log = logging.getLogger(__name__)

ENVIRONMENT_POOL = "rl_core.environments.pool:EnvironmentPool.of"

PERIOD_S = 10.0
"""Seconds between two questions to environments."""

SILENCE_S = 30.0
"""Additional seconds, after its deadline, in which an environment's host must answer a question."""

FINISH_S = 2.0
"""Timeout in seconds of the last answers."""

Start = Sequence[tuple[Callable[[int], ActorHandle], Placement]]
"""How the empty process of a replica on each of its nodes is started, by the number of the replica, and where its part
of the engine runs."""


class Replicas:
    """All rollout workers of a run with their replicas, and the environments that they call.

    Args:
        backend: Backend of generation.
        needs: The needs of the rollout workers.
        environments: Settings of environments by name: the section `env`.
        processes: Processes of the run.
        stack: Closes the environments and gives devices back.
        reports_load: True if the load of the engines is read although there is only one.
        turns: Folder for the turns of finished groups; empty if they are not kept.
    """

    def __init__(
        self,
        backend: GenerationBackend,
        needs: RolloutNeeds,
        environments: Any,
        processes: Processes,
        *,
        stack: ExitStack,
        reports_load: bool = False,
        turns: str = "",
    ) -> None:
        self._backend = backend
        self._turns = turns
        self._needs = needs
        self._settings = environments
        self._topology = processes.topology
        self._cluster = processes.cluster
        self.is_granted = processes.cluster.is_placed
        """Return whether the cluster has placed requested devices."""
        self._processes = processes
        self._stack = stack
        self._reports_load = reports_load
        self._bundles: list[list[Bundle]] = []
        self._environments: dict[str, RemoteEnvironment] = {}
        self._environment_processes: dict[str, EnvironmentActor] = {}
        self._starting_judges: list[ray.ObjectRef] = []
        self.judges: RemoteJudges | None = None
        """Language models that judge rollouts, once they have been started; None without judges."""
        self._devices: dict[Replica, list[Bundle]] = {}
        self._nodes: dict[Replica, list[str]] = {}

    def reserve(self) -> None:
        """Allocate devices for replicas only."""
        topology = self._topology
        self._bundles = self._cluster.reserve_replicas(
            topology.num_replicas,
            topology.replica_resources,
            least=topology.fewest_replicas,
            num_nodes=topology.replica_nodes,
        )
        self._stack.callback(lambda: self._cluster.release(self._bundles))

    def roles(self, beside: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield pairs: Ray's id of a node, and the role of a worker on it.

        Args:
            beside: Nodes of the policy. Replicas without their own devices share its devices, and environments run
                there if the nodes of replicas may be lost.
        """
        for node in [bundle.node for bundles in self._bundles for bundle in bundles] or beside:
            for role in self._roles:
                yield node, role
        if self._topology.is_elastic:
            if self._needs.judges:
                yield beside[0], GENERATION
            for name in sorted(self._needs.environments):
                yield beside[0], environment_role(name)

    def begin_beside(self, places: Sequence[Place], *, awaits_weights: bool = True) -> Callable[[], list[Replica]]:
        """Start replicas next to the ranks of a model, on the GPUs that Ray assigned to these. See `begin_alone`."""
        topology, device = self._topology, self._topology.device
        node_ranks, own_ranks = topology.devices(GENERATION).ranks, topology.replica_resources
        shared = Placement(
            device.name,
            shares_devices=device.has_gpus,
            awaits_weights=awaits_weights,
            keeps_weights=device.has_gpus and not awaits_weights,
            num_nodes=topology.replica_nodes,
        )

        def start(node: str, position: int, index: int) -> ActorHandle:
            return self._cluster.start_async_worker(self._process(node, index, position))

        placements: list[tuple[str, Placement]] = []
        for here in (places[first : first + node_ranks] for first in range(0, len(places), node_ranks)):
            node = here[0].node
            if device.has_gpus:
                gpus = tuple(gpu for place in here for gpu in place.gpus)
                firsts = range(0, len(gpus), own_ranks)
                placements += [(node, replace(shared, gpus=gpus[first : first + own_ranks])) for first in firsts]
            else:
                threads = self._processes.cores(node, node_ranks) // topology.replica_ranks or 1
                placements.append((node, replace(shared, cpu_threads=threads)))
        starts = [
            [
                (partial(start, node, position), replace(placement, node=position))
                for position, (node, placement) in enumerate(placements[first : first + topology.replica_nodes])
            ]
            for first in range(0, len(placements), topology.replica_nodes)
        ]
        return self._begin(starts, places[0].node)

    def begin_alone(self, beside: str = "", *, awaits_weights: bool) -> Callable[[], list[Replica]]:
        """Start replicas on their own devices, and environments. The returned function waits until they are ready.

        Args:
            beside: A node of the policy for environments if the nodes of replicas may be lost.
            awaits_weights: True if a policy will send them weights before they generate.
        """
        nodes = [[bundle.node for bundle in bundles] for bundles in self._bundles]
        starts = [
            self._start_alone(bundles, on, awaits_weights=awaits_weights)
            for bundles, on in zip(self._bundles, nodes, strict=True)
        ]
        finish = self._begin(starts, beside if self._topology.is_elastic else nodes[0][0])

        def finish_alone() -> list[Replica]:
            replicas = finish()
            self._devices = dict(zip(replicas, self._bundles, strict=True))
            self._nodes = dict(zip(replicas, nodes, strict=True))
            return replicas

        return finish_alone

    def request(self) -> list[Bundle]:
        """Ask the cluster for the devices of one more replica, without waiting."""
        topology = self._topology
        bundles = self._cluster.request_replica(topology.replica_resources, topology.replica_nodes)
        self._bundles.append(bundles)
        return bundles

    def begin_on(self, devices: list[Bundle]) -> tuple[Replica, Callable[[], None]]:
        """Begin to start a replica on granted devices, after the preparation of their nodes. The returned function
        waits until it is ready.

        Raises:
            RLError: If a node cannot be prepared.
        """
        nodes = [self._cluster.node_of(bundle) for bundle in devices]
        self._processes.prepare((node, role) for node in nodes for role in self._roles)
        taken = {replica.index for replica in self._devices}
        index = next(index for index in itertools.count() if index not in taken)
        replica = self._replica(self._start_alone(devices, nodes, awaits_weights=True), index)
        self._devices[replica] = devices
        self._nodes[replica] = nodes
        return replica, replica.begin_start()

    def give_back(self, devices: list[Bundle]) -> None:
        """Release devices without a started replica."""
        self._bundles.remove(devices)
        self._cluster.release([devices])

    def discard(self, replica: Replica) -> None:
        """End a replica's processes and release its devices. The run does not need those of its nodes any more that
        have no other replicas.
        """
        replica.kill()
        self.give_back(self._devices.pop(replica))
        nodes = self._nodes.pop(replica)
        for node in set(nodes).difference(*self._nodes.values()):
            self._processes.nodes.leave(node, self._roles)

    def environment_watch(self) -> EnvironmentWatch:
        """Return the watch over the processes of the environments that have been started."""
        return EnvironmentWatch(self._environment_processes)

    def monitored_environments(self) -> list[Monitored]:
        """Return the processes of the environments, for readings."""
        return [
            Monitored(Path(each.log).stem, "environment", 0, each.node, each.actor)
            for each in self._environment_processes.values()
        ]

    @property
    def _roles(self) -> list[str]:
        """Roles of the workers on a node that generates."""
        return [GENERATION, *map(environment_role, sorted(self._needs.environments))]

    def _begin(self, starts: Sequence[Start], host: str) -> Callable[[], list[Replica]]:
        if self._needs.judges:
            is_fixed = not any(placement.awaits_weights for start in starts for _, placement in start)
            self.judges = self._start_judges(host, is_fixed=is_fixed)
        self._environments = {name: self._environment(name, host) for name in sorted(self._needs.environments)}
        replicas = [self._replica(start, index) for index, start in enumerate(starts)]
        waits = [replica.begin_start() for replica in replicas]

        def finish() -> list[Replica]:
            for wait_until_ready in waits:
                wait_until_ready()
            # The process of the judges has started meanwhile.
            origins = [FailureOrigin(JUDGES, 0, "its node", "start")] * len(self._starting_judges)
            gather_start(self._starting_judges, origins, self._processes.timeouts.process, JUDGES)
            return replicas

        return finish

    def _start_alone(self, bundles: Sequence[Bundle], nodes: Sequence[str], *, awaits_weights: bool) -> Start:
        """Return the start of a replica on its own devices: the GPUs that Ray shows to its processes."""
        device, ranks = self._topology.device, self._topology.replica_resources

        def start(bundle: Bundle, position: int, index: int) -> ActorHandle:
            # Ray may have moved the devices to another node.
            now = self._cluster.node_of(bundle)
            self._processes.prepare((now, role) for role in self._roles)
            process = self._process(now, index, position, num_gpus=device.num_gpus(ranks))
            return self._cluster.start_async_worker(process, bundle=bundle)

        def placement(node: str, position: int) -> Placement:
            threads, count = 1, len(bundles)
            if not device.has_gpus:
                threads = self._processes.cores(node, ranks) // self._topology.replica_ranks or 1
            return Placement(device.name, (), threads, awaits_weights=awaits_weights, node=position, num_nodes=count)

        placed = enumerate(zip(bundles, nodes, strict=True))
        return [(partial(start, bundle, place), placement(node, place)) for place, (bundle, node) in placed]

    def _replica(self, starts: Start, index: int) -> Replica:
        backend, placement = self._backend, starts[0][1]
        config = backend.config
        # The rollouts of each of several replicas follow its load.
        reports_load = self._reports_load or self._topology.num_replicas > 1
        # Without weight updates, an older version of the policy is the policy.
        needs = [need for need in self._needs.opponents if placement.awaits_weights or need.model_name is not None]
        placement = replace(placement, reports_load=reports_load, num_engines=1 + len(needs), replica=index)
        opponents = tuple(self._opponent(need, placement) for need in needs)
        judging = judging_spec(self._needs, backend.model, opponents, awaits_weights=placement.awaits_weights)
        if placement.awaits_weights:
            placement = replace(placement, reports_routing=backend.reports_routing, keeps_cache=self._needs.keeps_cache)
        elif backend.model.lora_cfg.max_adapters == 1:
            # Nothing is sent to it, and it serves whole weights from files.
            config = config.model_copy(update={"lora_sync": "merged"})
        spec = RolloutWorkerSpec(
            generator=backend.plugin.worker,
            generator_args=(config, backend.backend, backend.model, placement),
            program=self._needs.program,
            program_args=self._needs.program_args,
            tokenizer=backend.model.tokenizer,
            model_name=backend.model.model_name,
            max_seconds=self._needs.max_seconds,
            max_steps=self._needs.max_steps,
            logs=self._processes.logs,
            opponents=opponents,
            vision=backend.model.vision,
            judging=judging,
            index=index,
            turns=self._turns,
        )
        logs = self._processes.logs
        followers = []
        for start, own in starts[1:]:
            args = (config, backend.backend, backend.model, replace(placement, node=own.node, gpus=own.gpus))
            log = f"{logs}/{name_of(index, own.node)}.log"
            followers.append(Follower(partial(start, index), backend.plugin.follower, args, log))
        return Replica(
            partial(starts[0][0], index),
            spec,
            self._environments,
            index=index,
            logs=logs,
            timeouts=self._processes.timeouts,
            judges=self.judges,
            followers=followers,
        )

    def _opponent(self, need: OpponentNeed, placement: Placement) -> OpponentSpec:
        """Return the spec of an engine next to the policy's engine, with whole weights from files."""
        backend, model = self._backend, self._backend.model
        if need.model_name is not None and need.shares:
            tokenizer = model.tokenizer.model_copy(update={"name": model.tokenizer.name or model.model_name})
            model = model.model_copy(update={"model_name": need.model_name, "tokenizer": tokenizer})
        elif need.model_name is not None:
            # A judge has its own tokens and reads text only.
            own_settings = {"tokenizer": TokenizerConfig(), "vision": VisionConfig(), "hf_config_overrides": {}}
            model = model.model_copy(update={"model_name": need.model_name, **own_settings})
        if not need.shares and (length := longest_judged(self._needs, need)) is not None:
            model = model.model_copy(update={"max_total_sequence_length": length})
        own = replace(placement, awaits_weights=need.model_name is None, keeps_weights=True)
        # No trainer reads the logprobs of this engine, so any model will do.
        config = backend.config.model_copy(update={"lora_sync": "merged", "exact": False})
        return OpponentSpec(need, (config, backend.backend, model, own))

    def _process(self, node: str, index: int, position: int, *, num_gpus: float = 0) -> WorkerProcess:
        name = name_of(index, position)
        return self._processes.on(node, GENERATION, num_gpus=num_gpus, number=index, name=name)

    def _environment(self, name: str, node: str) -> RemoteEnvironment:
        instance = instance_of(self._settings, name).without(self._needs.later.get(name, ()))
        # The name of the log is `reward.score` for the label `reward.py:score`.
        file_name = re.sub(r"[^\w.-]", "_", instance.label.replace(".py:", "."))
        log = f"{self._processes.logs}/environment-{file_name}.log"
        actor = self._cluster.start_restarting_worker(
            self._processes.on(node, environment_role(name)),
            log,
            f"environment {instance.label}",
            ENVIRONMENT_POOL,
            instance.environment,
            instance.config,
            instance.label,
            *(() if self.judges is None else (self.judges,)),
        )
        origin = FailureOrigin(f"environment {instance.label}", 0, "its node", "start")
        gather_start([actor.call.remote("health")], [origin], self._processes.timeouts.process, origin.role)

        def close() -> None:
            try:
                gather([actor.call.remote("close")], [origin], 30.0)
            except RLError as error:
                _log.warning("%s", error)

        self._stack.callback(close)
        deadline_s = instance.config.deadline_s
        self._environment_processes[instance.label] = EnvironmentActor(actor, log, deadline_s, node)
        return RemoteEnvironment(actor, name=instance.label)

    def _start_judges(self, node: str, *, is_fixed: bool) -> RemoteJudges:
        """Start the process that asks the judges of the run.

        Args:
            node: Ray's id of its node.
            is_fixed: True if the weights of the policy never change.
        """
        logs = self._processes.logs
        log, spec = f"{logs}/{JUDGES}.log", host_spec(self._needs, self._backend.model, Path(logs).parent, is_fixed)
        process, actor_name = self._processes.on(node, GENERATION), f"{JUDGES}-{uuid.uuid4().hex}"
        actor = self._cluster.start_restarting_worker(process, log, JUDGES, JUDGE_HOST, spec, actor_name=actor_name)
        self._starting_judges = [actor.call.remote("health")]

        def close() -> None:
            try:
                gather([actor.call.remote("close")], [FailureOrigin(JUDGES, 0, "its node", "close")], 30.0)
            except RLError as error:
                _log.warning("%s", error)

        self._stack.callback(close)
        self._environment_processes[JUDGES] = EnvironmentActor(actor, log, 0.0, node)
        return RemoteJudges(actor_name, tuple(self._needs.judges))


class EnvironmentActor(NamedTuple):
    """A process that holds an `rl_core.environments.pool.EnvironmentPool`.

    Attributes:
        actor: The process.
        log: Path of its log.
        deadline_s: `deadline_s` of the environment.
        node: Ray's id of its node.
    """

    actor: ActorHandle
    log: str
    deadline_s: float
    node: str


class EnvironmentWatch:
    """Asks environments periodically how often their processes were restarted, and warns of further restarts.

    A host that does not answer, for example because it is stopped, is killed. Ray starts it again, and repeats the
    calls that wait for it.

    Args:
        environments: Processes of the environments, by label.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, environments: Mapping[str, EnvironmentActor], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._environments = environments
        self._clock = clock
        self._asked: dict[str, ray.ObjectRef] = {}
        self._asked_at = clock()
        self._num_known = dict.fromkeys(environments, 0)
        self._killed: set[str] = set()

    @property
    def actors(self) -> dict[str, ActorHandle]:
        """The actors, by the names of their logs."""
        return {Path(each.log).stem: each.actor for each in self._environments.values()}

    def check(self) -> None:
        """Ask, or read the answers that have arrived; never waits."""
        for label, ref in list(self._asked.items()):
            if wait([ref], 0):
                self._read(label, self._asked.pop(label))
        now = self._clock()
        for label in self._asked.keys() - self._killed:
            timeout_s = self._environments[label].deadline_s + SILENCE_S
            if now - self._asked_at > timeout_s:
                # A restart may take long, so a process is not killed twice for one question.
                self._killed.add(label)
                text = "environment %s: its host has not answered for %g s, %g more than its deadline_s; it is killed "
                _log.warning(text + "and started again", label, timeout_s, SILENCE_S)
                ray.kill(self._environments[label].actor, no_restart=False)
        if not self._asked and now - self._asked_at >= PERIOD_S:
            self._ask()
            self._asked_at = now

    def finish(self) -> None:
        """Ask a last time, and wait briefly for the answers."""
        end = self._clock() + FINISH_S
        self._ask()
        for label, ref in self._asked.items():
            self._read(label, ref, max(0.0, end - self._clock()))
        self._asked = {}

    def _ask(self) -> None:
        self._killed.clear()
        self._asked = {label: each.actor.call.remote("health") for label, each in self._environments.items()}

    def _read(self, label: str, ref: ray.ObjectRef, timeout_s: float | None = None) -> None:
        try:
            health = fetch(ref, FailureOrigin(f"environment {label}", 0, "its node", "health"), timeout_s)
        except RLError as error:
            # The rollouts that need it fail with this error.
            _log.debug("%s", error)
            return
        count, known = health["num_restarts"], self._num_known[label]
        self._num_known[label] = count
        # A process that was restarted counts from 0.
        num_new = count - known if count >= known else count
        if num_new > 0:
            spans.mark(RESTARTS, f"environment {label}: {num_new} process(es) restarted")
            text = "environment %s: %d restart(s) of its processes, %d so far, the last because %s. More: %s"
            _log.warning(text, label, num_new, count, health["restart_reason"], self._environments[label].log)
