"""A run's processes: from a resolved config to the objects that an algorithm works with."""

from __future__ import annotations

import itertools
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.actor import ActorHandle

from rl_core.config import EnvVars
from rl_core.devices import Device
from rl_core.environments.instance import instance_of
from rl_core.errors import ConfigError
from rl_core.model_config import local_image_token
from rl_core.plugins import BackendPlugin, RolloutNeeds
from rl_core.ray.model import RemoteModel
from rl_core.run import Components
from rl_core.weights import WeightTarget
from rl_launch.backends import Backends
from rl_launch.cluster.node_task import usable_cores
from rl_launch.cluster.nodes import Nodes, log_places
from rl_launch.cluster.start_wait import REPORT_S, busy
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.model_files.local_models import model_folders
from rl_launch.monitoring.poller import Monitored
from rl_launch.placement.residency import Residency
from rl_launch.placement.topology import GENERATION, Topology
from rl_launch.root_config import DRAFT_HEAD, DRAFTER, POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.runtime.canary import Canary
from rl_launch.runtime.elastic_replicas import ElasticReplicas
from rl_launch.runtime.environment_watch import EnvironmentWatch
from rl_launch.runtime.model_group import StartTimeouts
from rl_launch.runtime.models import Models
from rl_launch.runtime.opponents import OpponentSync
from rl_launch.runtime.process_spans import NamedActor
from rl_launch.runtime.processes import NsysReports, Processes, server_stay_s, variables_of_worker, with_allocators
from rl_launch.runtime.profiled_steps import Profiled, folder_of
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.replica_group import WeightSender
from rl_launch.runtime.replicas import Replicas
from rl_launch.runtime.role_envs import role_specs
from rl_launch.runtime.rollout_pool import RolloutPool
from rl_launch.runtime.weight_sync import WeightSync
from rl_launch.runtime.weight_transfer import SYNC_TIMEOUT_S, WeightTransfer
from rl_launch.runtime.written_versions import WrittenVersions
from rl_launch.session.config import ProfilingConfig
from rl_launch.worker_envs.engine_checks import engine_problems
from rl_launch.worker_envs.provision import DriverEnvs

_log = logging.getLogger(__name__)


def provision_workers(plan: RunPlan, needs: RolloutNeeds | None, device: Device) -> DriverEnvs:
    """Environments on this node for every kind of worker the run has.

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
    backends = plan.backends
    chosen = [(role, model.section, model.plugin) for role, model in backends.models.items()]
    if backends.generation is not None:
        chosen.append((GENERATION, POLICY, backends.generation.plugin))

    preloads = backends.preloads(device)
    fork_server_s = server_stay_s(plan.config.cluster.fork_server_s, device)
    cores, ranks = usable_cores(), device.ranks_per_node(plan.config.cluster)
    env_vars = env_vars_by_role(backends)

    def problems_of(role: str, key: str, found: BackendPlugin) -> list[str]:
        if not found.preflight:
            return []
        python = envs.interpreters[role]
        # those of the worker, so that both are forked from the same process
        variables = variables_of_worker(
            python,
            preloads[role],
            device,
            plan.config.cluster.env_vars,
            env_vars[role],
            num_threads=cores if role == GENERATION else max(1, cores // ranks),
        )
        texts = engine_problems(
            python,
            found.preflight,
            plan.section(key),
            variables=variables,
            imports=preloads[role].modules,
            fork_server_s=fork_server_s,
        )
        return [f"{key}.{text}" for text in texts]

    begun = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as threads:
        answers = {threads.submit(problems_of, *each): each[0] for each in chosen}
        while waiting := wait(answers, REPORT_S).not_done:
            roles = ", ".join(role for answer, role in answers.items() if answer in waiting)
            _log.info("still checking after %.0f s: %s%s", time.monotonic() - begun, roles, busy())
    if problems := [problem for answer in answers for problem in answer.result()]:
        raise ConfigError("\n".join(problems))


def env_vars_by_role(backends: Backends) -> dict[str, EnvVars]:
    """Return the environment variables that the config sets for the workers of each role."""
    found = {role: model.config.env_vars for role, model in backends.models.items()}
    if backends.generation is not None:
        found[GENERATION] = backends.generation.config.env_vars
    return found


class Runtime:
    """Starts the processes of a run on a cluster, and ends all of them.

    Args:
        plan: Plan of the run; every model and engine of its backends is started.
        envs: Environments of the workers on the driver's node.
        cluster: The started cluster.
        logs: Folder for the workers' logs.
        profiling: What is profiled; None for nothing.
        reads_load: True if the load of replicas is read.
    """

    def __init__(
        self,
        plan: RunPlan,
        envs: DriverEnvs,
        cluster: VirtualCluster,
        logs: Path,
        *,
        profiling: ProfilingConfig | None = None,
        reads_load: bool = False,
    ) -> None:
        config, backends = plan.config, plan.backends
        self._config = config
        self._backends = backends
        self._cluster = cluster
        self._reads_load = reads_load
        self._exit = ExitStack()
        self._residency = Residency()
        self._ranks: Mapping[str, RemoteModel] = {}
        self._environments: EnvironmentWatch | None = None
        self.rollout_pool: RolloutPool | None = None
        self._models: Models | None = None
        self._replicas: Replicas | None = None
        self._logs = str(logs)
        self._timeouts = StartTimeouts(config.cluster.process_timeout_s, config.cluster.start_timeout_s)
        self.topology: Topology = backends.topology(cluster.num_nodes, cluster.ranks_per_node, cluster.device)
        loaded = {model.section: model.config for model in backends.models.values()}
        if backends.generation is not None:
            loaded[POLICY] = backends.generation.model
        further = plan.plugin.further_models(config)
        loaded |= {
            key.removesuffix(".model_name"): loaded[POLICY].model_copy(update={"model_name": name})
            for key, name in further.items()
        }
        self._nodes = Nodes(
            envs,
            logs,
            model_folders=model_folders(loaded),
            answer_timeout_s=config.cluster.process_timeout_s,
            build_timeout_s=config.cluster.worker_envs_timeout_s,
        )
        self._processes = Processes(
            cluster,
            self._nodes,
            env_vars=config.cluster.env_vars,
            env_vars_by_role=env_vars_by_role(backends),
            preloads=with_allocators(backends.preloads(cluster.device), self.topology),
            fork_server_s=config.cluster.fork_server_s,
            nsys=None if profiling is None else _nsys_reports(profiling, logs.parent),
        )

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def lost_nodes(self) -> list[str]:
        """Addresses of the run's nodes that are lost, once Ray knows it too."""
        return self._nodes.lost()

    def monitored(self) -> list[Monitored]:
        """The workers at present, for readings. Any thread can call it."""
        pool, replicas, models = self.rollout_pool, self._replicas, self._models
        generating = [replica.monitored for replica in pool.replicas] if pool is not None else []
        return [
            *(models.monitored() if models is not None else ()),
            *(worker for worker in generating if worker is not None),
            *(replicas.monitored_environments() if replicas is not None else ()),
        ]

    def components(self, data: Any, needs: RolloutNeeds | None, vocabulary: int) -> Components:
        """Start everything the algorithm needs.

        Args:
            data: The result of its `prepare`.
            needs: The needs of its rollout workers; None if it does not generate.
            vocabulary: Number of tokens the canary may draw from if there are no prompts.
        """
        if needs is None:
            return Components(models=self.models(), data=data)
        models, replicas = self._new_models(), self._new_replicas(needs)
        models.reserve()
        if GENERATION not in self.topology.sharing:
            replicas.reserve()
        policy_nodes = [node for node, role in models.roles() if role == POLICY]
        self._processes.prepare([*models.roles(), *replicas.roles(policy_nodes)])
        takes_turns = self.topology.takes_turns(GENERATION)
        start = self._start_in_turns if takes_turns else self._start_side_by_side
        by_role, started = start(models, replicas)
        self._ranks = by_role
        residency = self._residency if takes_turns else None
        sync = self._weight_sync(by_role, models, residency, vocabulary, needs.sample_prompts)
        elastic = self._elastic(replicas) if self.topology.is_elastic else None
        opponents = self._opponents(needs, sync)
        weights = sync if opponents is None else opponents
        pool = self._pool(started, residency, replicas.environment_watch(), weights=weights, elastic=elastic)
        log_places({worker.name: worker.node for worker in self.monitored()})
        trained = self._with_draft_head(by_role)
        return Components(models=trained, data=data, weights=sync, pool=pool, opponents=opponents)

    def processes(self) -> list[NamedActor]:
        """The processes of the run as they are now: ranks, rollout workers and environments."""
        pool, environments = self.rollout_pool, self._environments
        named = {name: actor for model in self._ranks.values() for name, actor in model.workers.items()}
        named |= {replica.name: replica.actor for replica in pool.living_replicas} if pool else {}
        named |= environments.actors if environments else {}
        return [NamedActor(name, actor) for name, actor in named.items()]

    def profiled(self) -> list[Profiled]:
        """The workers that can be profiled: ranks of models, and rollout workers."""
        ranks = [
            Profiled(name, rank, partial(_call, actor))
            for model in self._ranks.values()
            for rank, (name, actor) in enumerate(model.workers.items())
        ]
        replicas = self.rollout_pool.living_replicas if self.rollout_pool else []
        return [*ranks, *(Profiled(each.name, each.index, each.call) for each in replicas)]

    def models(self) -> Mapping[str, RemoteModel]:
        """All models by role, without generation."""
        models = self._new_models()
        models.reserve()
        self._processes.prepare(models.roles())
        models.begin()
        models.build_in_turns()
        self._ranks = models.finish()
        log_places({worker.name: worker.node for worker in self.monitored()})
        return self._ranks

    def evaluation_pool(self, needs: RolloutNeeds) -> RolloutPool:
        """Start only replicas, which serve the weights at `policy.model_name`."""
        replicas = self._new_replicas(needs)
        replicas.reserve()
        self._processes.prepare(replicas.roles(()))
        started = replicas.begin_alone(awaits_weights=False)()
        return self._pool(started, None, replicas.environment_watch())

    def _new_models(self) -> Models:
        self._models = Models(
            self._backends.models,
            self.topology,
            self._cluster,
            self._processes,
            residency=self._residency,
            logs=self._logs,
            timeouts=self._timeouts,
            stack=self._exit,
        )
        return self._models

    def _new_replicas(self, needs: RolloutNeeds) -> Replicas:
        assert self._backends.generation is not None, "rollouts need generation"
        self._replicas = Replicas(
            self._backends.generation,
            needs,
            self._config.env,
            self.topology,
            self._cluster,
            self._processes,
            logs=self._logs,
            timeouts=self._timeouts,
            stack=self._exit,
            reports_load=self._reads_load,
        )
        return self._replicas

    def _start_side_by_side(
        self, models: Models, replicas: Replicas
    ) -> tuple[Mapping[str, RemoteModel], list[Replica]]:
        """Load the replicas while the models are built."""
        models.begin()
        wait_for_replicas = self._begin_replicas(replicas, models)
        models.build_in_turns()
        by_role = models.finish()
        return by_role, wait_for_replicas()

    def _start_in_turns(self, models: Models, replicas: Replicas) -> tuple[Mapping[str, RemoteModel], list[Replica]]:
        """Load the replicas once the models that share devices with them are built and have left these."""
        models.begin()
        models.build_in_turns()
        wait_for_replicas = self._begin_replicas(replicas, models)
        by_role = models.finish()
        return by_role, wait_for_replicas()

    def _begin_replicas(self, replicas: Replicas, models: Models) -> Callable[[], list[Replica]]:
        if GENERATION in self.topology.sharing:
            return replicas.begin_beside(models.group(POLICY).places)
        return replicas.begin_alone(models.group(POLICY).places[0].node, awaits_weights=True)

    def _elastic(self, replicas: Replicas) -> ElasticReplicas:
        return ElasticReplicas(
            replicas,
            least=self.topology.fewest_replicas,
            most=self.topology.most_replicas,
            timeout_s=self._config.cluster.replacement_timeout_s,
        )

    def _with_draft_head(self, by_role: Mapping[str, RemoteModel]) -> Mapping[str, RemoteModel]:
        """The models, and the draft head that trains in the processes of the policy, if there is one."""
        if self._backends.models[POLICY].config.draft_head is None:
            return by_role
        return {**by_role, DRAFTER: by_role[POLICY].part(DRAFT_HEAD, role=DRAFTER, section=f"{POLICY}.{DRAFT_HEAD}")}

    def _weight_folders(self) -> Callable[[], str]:
        """Give out folders for the weights that travel through files; nothing in them outlasts the run."""
        folder = Path(self._logs).parent / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        numbers = itertools.count(1)
        return lambda: str(folder / str(next(numbers)))

    def _opponents(self, needs: RolloutNeeds, sync: WeightSync) -> OpponentSync | None:
        """The opponents that are versions of the policy; None if there are none."""
        older = [need for need in needs.opponents if need.update_every is not None]
        if not older:
            return None
        versions = WrittenVersions(Path(self._logs).parent / "opponents")
        self._exit.callback(versions.close)
        return OpponentSync(older, sync, versions)

    def _weight_sync(
        self,
        by_role: Mapping[str, RemoteModel],
        models: Models,
        residency: Residency | None,
        vocabulary: int,
        prompts: Sequence[Sequence[int]],
    ) -> WeightSync:
        assert self._backends.generation is not None, "rollouts need generation"
        canary = Canary.of(
            vocabulary,
            precision=self._backends.models[POLICY].config.precision,
            tolerance=self._backends.generation.config.canary_tolerance,
            prompts=prompts,
            image_token=local_image_token(self._backends.models[POLICY].config),
        )
        folders = self._weight_folders()

        senders = self._with_draft_head(by_role)

        def way(target: WeightTarget) -> WeightTransfer:
            role = target if target in by_role else POLICY
            kind = self.topology.transport_of(role)
            return WeightTransfer(
                senders[target],
                target,
                tenant=role,
                kind=kind,
                meet=models.group(role).meeting_point if kind != "disk" else folders,
                residency=self._residency if self.topology.takes_turns(role) else None,
                gives_way=self.topology.takes_turns(role) and self.topology.takes_turns(GENERATION),
                bucket_bytes=self.topology.device.bucket_bytes,
                sends_changes=self.topology.weight_sync_encoding == "changes",
                timeout_s=timeout_s,
            )

        timeout_s = min(SYNC_TIMEOUT_S, self._config.policy.worker_timeout_s)
        return WeightSync(
            way(POLICY),
            timeout_s=timeout_s,
            canary=canary,
            residency=residency,
            drafter=way(DRAFTER) if DRAFTER in senders else None,
            sends_adapters=self._backends.generation.config.lora_sync == "adapter",
        )

    def _pool(
        self,
        replicas: list[Replica],
        residency: Residency | None,
        environments: EnvironmentWatch,
        *,
        weights: WeightSender | None = None,
        elastic: ElasticReplicas | None = None,
    ) -> RolloutPool:
        assert self._backends.generation is not None, "rollouts need generation"
        self._environments = environments
        self.rollout_pool = pool = RolloutPool(
            replicas,
            residency,
            stall_timeout_s=self._backends.generation.config.stall_timeout_s,
            weights=weights,
            elastic=elastic,
            environments=environments,
        )
        self._exit.callback(pool.close)
        return pool


def _call(actor: ActorHandle, method: str, *args: Any) -> ray.ObjectRef:
    """Call a method of a host itself, not of the worker that it holds."""
    return getattr(actor, method).remote(*args)


def _nsys_reports(config: ProfilingConfig, run_dir: Path) -> NsysReports | None:
    """Reports of the workers that nsys profiles; None if it is not one of the tools."""
    if config.steps is None or "nsys" not in config.tools:
        return None
    return NsysReports(folder_of(run_dir, *config.steps), frozenset(config.ranks))
