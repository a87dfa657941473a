"""A run's processes: from a resolved config to the objects that an algorithm works with."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rl_core.model_config import local_image_token
from rl_core.plugins import RolloutNeeds
from rl_core.ray.model import RemoteModel
from rl_core.run import Components
from rl_core.weights import WeightTarget
from rl_launch.cluster.nodes import Nodes, log_places
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.model_files.local_models import model_folders
from rl_launch.monitoring.poller import Monitored
from rl_launch.placement.residency import TenantResidency
from rl_launch.placement.topology import GENERATION, Topology
from rl_launch.root_config import DRAFT_HEAD, DRAFTER, POLICY
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session.config import ProfilingConfig
from rl_launch.runtime.elastic_replicas import ElasticReplicas
from rl_launch.runtime.models import Models
from rl_launch.runtime.observed_steps import Profiled, folder_of
from rl_launch.runtime.opponents import OpponentSync, WeightSender, WrittenVersions
from rl_launch.runtime.processes import NsysReports, Processes, StartTimeouts, with_allocators
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.replicas import EnvironmentWatch, Replicas
from rl_launch.runtime.rollout_pool import ReplicaPool
from rl_launch.runtime.weight_sync import Canary, WeightSync
from rl_launch.runtime.weight_transfer import SYNC_TIMEOUT_S, WeightTransfer
from rl_launch.worker_envs.provision import DriverEnvs

_log = logging.getLogger(__name__)


class Runtime:
    """Starts the processes of a run on a cluster, and ends all of them.

    Args:
        plan: Plan of the run; every model and engine of its backends is started.
        envs: Environments of the workers on the driver's node.
        cluster: The started cluster.
        logs: Folder for the workers' logs.
        profiling: Settings of profiles; None for none.
        reads_load: True if the load of replicas is read.

    Attributes:
        topology: Devices of the run.
        nodes: Nodes of the run.
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
        self._reads_load = reads_load
        self._exit = ExitStack()
        self._residency = TenantResidency()
        self._ranks: Mapping[str, RemoteModel] = {}
        self._environments: EnvironmentWatch | None = None
        self.rollout_pool: ReplicaPool | None = None
        self._models: Models | None = None
        self._replicas: Replicas | None = None
        self._logs = str(logs)
        self.topology: Topology = backends.topology(cluster.num_nodes, cluster.ranks_per_node, cluster.device)
        loaded = {model.section: model.config for model in backends.models.values()}
        if backends.generation is not None:
            loaded[POLICY] = backends.generation.model
        further = plan.plugin.further_models(config)
        loaded |= {
            key.removesuffix(".model_name"): loaded[POLICY].model_copy(update={"model_name": name})
            for key, name in further.items()
        }
        self.nodes = Nodes(
            envs,
            logs,
            model_folders=model_folders(loaded),
            answer_timeout_s=config.cluster.process_timeout_s,
            build_timeout_s=config.cluster.worker_envs_timeout_s,
        )
        nsys = None
        if profiling is not None and profiling.steps is not None and "nsys" in profiling.tools:
            nsys = NsysReports(folder_of(logs.parent, *profiling.steps), frozenset(profiling.ranks))
        self._processes = Processes(
            cluster,
            self.nodes,
            self.topology,
            logs=self._logs,
            timeouts=StartTimeouts(config.cluster.process_timeout_s, config.cluster.start_timeout_s),
            env_vars=config.cluster.env_vars,
            env_vars_by_role={role: each.config.env_vars for role, each in backends.by_role.items()},
            preloads=with_allocators(backends.preloads(cluster.device), self.topology),
            fork_server_s=config.cluster.fork_server_s,
            nsys=nsys,
        )

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def monitored(self) -> list[Monitored]:
        """Return the workers at present, for readings. Any thread can call it."""
        pool, replicas, models = self.rollout_pool, self._replicas, self._models
        generating = [each for replica in pool.replicas for each in replica.monitored] if pool is not None else []
        return [
            *(models.monitored() if models is not None else ()),
            *generating,
            *(replicas.monitored_environments() if replicas is not None else ()),
        ]

    def processes(self) -> dict[str, ActorHandle]:
        """Return the processes of the run as they are now, by the names of their logs: ranks, rollout workers and
        environments."""
        pool, environments = self.rollout_pool, self._environments
        named = {name: actor for model in self._ranks.values() for name, actor in model.workers.items()}
        named |= {replica.name: replica.actor for replica in pool.living_replicas} if pool else {}
        return named | (environments.actors if environments else {})

    def profiled(self) -> list[Profiled]:
        """Return the workers that can be profiled: ranks of models, and rollout workers."""
        ranks = [
            Profiled(name, rank, partial(_call, actor))
            for model in self._ranks.values()
            for rank, (name, actor) in enumerate(model.workers.items())
        ]
        replicas = self.rollout_pool.living_replicas if self.rollout_pool else []
        return [*ranks, *(Profiled(each.name, each.index, each.call) for each in replicas)]

    def models(self) -> Mapping[str, RemoteModel]:
        """Start all models, without generation; return them by role."""
        models = self._new_models()
        models.reserve()
        self._processes.prepare(models.roles())
        models.begin()
        models.build_in_turns()
        self._ranks = models.finish()
        log_places({worker.name: worker.node for worker in self.monitored()})
        return self._ranks

    def evaluation_pool(self, needs: RolloutNeeds) -> ReplicaPool:
        """Start replicas, which serve the weights at `policy.model_name`, and the models of the plan, which judge."""
        topology, models, replicas = self.topology, self._new_models(), self._new_replicas(needs)
        models.reserve()
        sharing = [name for name in topology.sharing if name != GENERATION] if GENERATION in topology.sharing else []
        takes_turns = topology.takes_turns(GENERATION)
        if not sharing:
            replicas.reserve()
        self._processes.prepare([*models.roles(), *replicas.roles([node for node, _ in models.roles()])])
        models.begin()
        if takes_turns:
            models.build_in_turns()
        if sharing:
            wait_for_replicas = replicas.begin_beside(models.group(sharing[0]).places, awaits_weights=False)
        else:
            wait_for_replicas = replicas.begin_alone(awaits_weights=False)
        if not takes_turns:
            models.build_in_turns()
        self._ranks = models.finish()
        residency = self._residency if takes_turns else None
        return self._pool(wait_for_replicas(), residency, replicas.environment_watch())

    @property
    def ranks(self) -> Mapping[str, RemoteModel]:
        """The models that have been started, by role."""
        return self._ranks

    def components(self, data: Any, needs: RolloutNeeds | None, vocabulary: int) -> Components:
        """Start everything the algorithm needs.

        Args:
            data: The result of its `prepare`.
            needs: The needs of its rollout workers; None if it does not generate.
            vocabulary: Number of tokens the canary may draw from if there are no prompts.
        """
        if needs is None:
            return Components(models=self.models(), data=data)
        topology = self.topology
        models, replicas = self._new_models(), self._new_replicas(needs)
        models.reserve()
        shares_devices, takes_turns = GENERATION in topology.sharing, topology.takes_turns(GENERATION)
        if not shares_devices:
            replicas.reserve()
        policy_nodes = [node for node, role in models.roles() if role == POLICY]
        self._processes.prepare([*models.roles(), *replicas.roles(policy_nodes)])
        models.begin()
        if takes_turns:
            # The replicas are loaded once the models that share devices with them are built and have left these.
            models.build_in_turns()
        places = models.group(POLICY).places
        if shares_devices:
            wait_for_replicas = replicas.begin_beside(places)
        else:
            wait_for_replicas = replicas.begin_alone(places[0].node, awaits_weights=True)
        if not takes_turns:
            models.build_in_turns()
        self._ranks = by_role = models.finish()
        started = wait_for_replicas()
        residency = self._residency if takes_turns else None
        trained: Mapping[str, RemoteModel] = by_role
        if self._backends.models[POLICY].config.draft_head is not None:
            # The draft head trains in the processes of the policy.
            head = by_role[POLICY].part(DRAFT_HEAD, role=DRAFTER, section=f"{POLICY}.{DRAFT_HEAD}")
            trained = {**by_role, DRAFTER: head}
        sync = self._weight_sync(trained, models, residency, vocabulary, needs.sample_prompts)
        elastic = None
        if topology.is_elastic:
            least, most = topology.fewest_replicas, topology.most_replicas
            timeout_s = self._config.cluster.replacement_timeout_s
            elastic = ElasticReplicas(replicas, least=least, most=most, timeout_s=timeout_s)
        opponents = None
        if older := [need for need in needs.opponents if need.update_every is not None]:
            versions = WrittenVersions(Path(self._logs).parent / "opponents")
            self._exit.callback(versions.close)
            opponents = OpponentSync(older, sync, versions)
        watch = replicas.environment_watch()
        pool = self._pool(started, residency, watch, weights=opponents or sync, elastic=elastic)
        log_places({worker.name: worker.node for worker in self.monitored()})
        judges = replicas.judges
        usage = None if judges is None else judges.usage
        return Components(models=trained, data=data, weights=sync, pool=pool, opponents=opponents, judge_usage=usage)

    def _new_models(self) -> Models:
        models, residency = self._backends.models, self._residency
        self._models = Models(models, self._processes, residency=residency, stack=self._exit)
        return self._models

    def _new_replicas(self, needs: RolloutNeeds) -> Replicas:
        generation, processes = self._backends.generation, self._processes
        assert generation is not None, "rollouts need generation"
        self._replicas = Replicas(
            generation,
            needs,
            self._config.env,
            processes,
            stack=self._exit,
            reports_load=self._reads_load,
            turns=str(Path(self._logs).parent / "turns") if self._config.logger.replay_enabled else "",
        )
        return self._replicas

    def _weight_sync(
        self,
        senders: Mapping[str, RemoteModel],
        models: Models,
        residency: TenantResidency | None,
        vocabulary: int,
        prompts: Sequence[Sequence[int]],
    ) -> WeightSync:
        assert self._backends.generation is not None, "rollouts need generation"
        policy, generation = self._backends.models[POLICY].config, self._backends.generation.config
        canary = Canary.of(
            vocabulary,
            precision=policy.precision,
            tolerance=generation.canary_tolerance,
            prompts=prompts,
            image_token=local_image_token(policy),
        )
        # Folders for weights that travel through files; nothing in them outlasts the run.
        folder, numbers = Path(self._logs).parent / "weights", itertools.count(1)
        shutil.rmtree(folder, ignore_errors=True)
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        topology = self.topology
        timeout_s = min(SYNC_TIMEOUT_S, self._config.policy.worker_timeout_s)

        def transfer(target: WeightTarget) -> WeightTransfer:
            role = target if target in self._backends.models else POLICY
            kind, takes_turns = topology.transport_of(role), topology.takes_turns(role)
            return WeightTransfer(
                senders[target],
                target,
                tenant=role,
                kind=kind,
                meet=models.group(role).meeting_point if kind != "disk" else lambda: str(folder / str(next(numbers))),
                residency=self._residency if takes_turns else None,
                gives_way=takes_turns and topology.takes_turns(GENERATION),
                bucket_bytes=topology.device.bucket_bytes,
                encoding=topology.weight_sync_encoding,
                timeout_s=timeout_s,
            )

        return WeightSync(
            transfer(POLICY),
            timeout_s=timeout_s,
            canary=canary,
            residency=residency,
            drafter=transfer(DRAFTER) if DRAFTER in senders else None,
            sends_adapters=generation.lora_sync == "adapter",
        )

    def _pool(
        self,
        replicas: list[Replica],
        residency: TenantResidency | None,
        environments: EnvironmentWatch,
        *,
        weights: WeightSender | None = None,
        elastic: ElasticReplicas | None = None,
    ) -> ReplicaPool:
        assert self._backends.generation is not None, "rollouts need generation"
        self._environments = environments
        self.rollout_pool = pool = ReplicaPool(
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
