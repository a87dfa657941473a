"""The models of a run: placed, built and handed out by role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import ray

from rl_core.config import Config
from rl_core.data.microbatch import PREFIX
from rl_core.errors import FailureOrigin
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.plugins import BackendPlugin
from rl_core.ray.calls import gather
from rl_core.ray.host import Place
from rl_core.ray.model import CALL_TIMEOUT_S, RemoteModel
from rl_core.rollouts.group import ROUTED_EXPERTS
from rl_launch.backends import ModelBackend
from rl_launch.cluster.start_wait import gather_start
from rl_launch.cluster.virtual_cluster import Bundle
from rl_launch.monitoring.poller import Monitored
from rl_launch.placement.residency import Tenant, TenantResidency
from rl_launch.runtime.processes import Processes


class ModelGroup:
    """All ranks of a model, placed; `finish` waits until the model is built.

    Placing and building are two steps so that other workers can start while the ranks load.

    Args:
        processes: Processes of the run.
        nodes: A bundle per rank, by node.
        role: Role of the model.
        section: Dotted key of the model's config section, for messages.
        num_gpus: Share of a GPU that Ray gives each rank.

    Raises:
        RLError: If a process does not start, with role and rank.
    """

    def __init__(
        self, processes: Processes, nodes: Sequence[Sequence[Bundle]], *, role: str, section: str, num_gpus: float
    ) -> None:
        cluster, logs, self._timeouts = processes.cluster, processes.logs, processes.timeouts
        self._device = cluster.device.name
        self._role = role
        self._section = section
        self._local_ranks = [local_rank for node in nodes for local_rank, _ in enumerate(node)]
        self._workers = [
            cluster.start_worker(
                processes.on(
                    bundle.node, role, num_gpus=num_gpus, shares_cores=True, number=rank, name=f"{role}-{rank}"
                ),
                bundle,
            )
            for rank, bundle in enumerate(bundle for node in nodes for bundle in node)
        ]
        unplaced = [FailureOrigin(role, rank, "its node", "start", section) for rank in range(len(self._workers))]
        self.places: list[Place] = gather_start(
            [w.place.remote() for w in self._workers], unplaced, self._timeouts.process, f"the processes of {role}"
        )
        self._logs = [f"{logs}/{role}-{rank}.log" for rank in range(len(self._workers))]
        gather_start(
            [worker.log_to.remote(path) for worker, path in zip(self._workers, self._logs, strict=True)],
            self._origins("start"),
            self._timeouts.process,
            f"the logs of {role}",
        )
        self._timeout_s = CALL_TIMEOUT_S
        self._trains = True
        self._columns: tuple[str, ...] = ()
        self._builds: list[ray.ObjectRef] = []

    def begin(
        self, plugin: BackendPlugin, config: ModelConfig, backend: Config, spec: ModelSpec, *, columns: Sequence[str]
    ) -> None:
        """Connect the ranks to rank 0 and build the model.

        Args:
            plugin: Backend that builds the model.
            config: Section of the model.
            backend: Settings of the backend.
            spec: Head of the model, and whether it trains.
            columns: Columns that all its passes read in addition to `tokens`.
        """
        self._columns = (*columns, *([PREFIX] if config.sequence_packing.shared_prefixes else []))
        self._timeout_s = config.worker_timeout_s
        self._trains = spec.trains
        head, world_size = self.places[0], len(self._workers)
        self._builds = [
            worker.build.remote(
                plugin.worker,
                config,
                backend,
                spec,
                Rendezvous(rank, world_size, local_rank, head.address, head.port, self._device),
            )
            for rank, (worker, local_rank) in enumerate(zip(self._workers, self._local_ranks, strict=True))
        ]

    def finish(self, hold: Callable[[], AbstractContextManager[None]]) -> RemoteModel:
        """Wait until all ranks have built the model, and return it.

        Raises:
            RLError: The first failure of a rank, with role, rank and node.
        """
        gather_start(self._builds, self._origins("start"), self._timeouts.model, f"loading {self._role}")
        nodes = [place.address for place in self.places]
        return RemoteModel(
            self._workers,
            role=self._role,
            section=self._section,
            nodes=nodes,
            hold=hold,
            timeout_s=self._timeout_s,
            logs=self._logs,
            trains=self._trains,
            columns=self._columns,
        )

    def monitored(self) -> list[Monitored]:
        """Return the ranks, for readings."""
        return [
            Monitored(f"{self._role}-{rank}", self._role, rank, place.node, worker, place.gpus)
            for rank, (worker, place) in enumerate(zip(self._workers, self.places, strict=True))
        ]

    def meeting_point(self) -> str:
        """Return `host:port` on rank 0's node. The port stays free for rank 0."""
        place = gather(
            [self._workers[0].place.remote()], self._origins("weight sync")[:1], self._timeouts.process.timeout_s
        )[0]
        return f"{place.address}:{place.port}"

    def _origins(self, phase: str) -> list[FailureOrigin]:
        return [
            FailureOrigin(self._role, rank, place.address, phase, self._section)
            for rank, place in enumerate(self.places)
        ]


class Models:
    """All models of a run. Those that take turns on devices are built one after the other, the others side by side.

    The usage loop::

        models.reserve()
        processes.prepare(models.roles())
        models.begin()
        models.build_in_turns()
        by_role = models.finish()

    Args:
        backends: Backends, by role.
        processes: Processes of the run.
        residency: Residency of the shared devices.
        stack: Closes the models and gives their devices back.
    """

    def __init__(
        self,
        backends: Mapping[str, ModelBackend],
        processes: Processes,
        *,
        residency: TenantResidency,
        stack: ExitStack,
    ) -> None:
        self._backends = dict(backends)
        self._topology = processes.topology
        self._processes = processes
        self._residency = residency
        self._stack = stack
        self._bundles: dict[str, list[list[Bundle]]] = {}
        self._groups: dict[str, ModelGroup] = {}
        self._models: dict[str, RemoteModel] = {}

    def reserve(self) -> None:
        """Take the devices of all models."""
        shared: list[list[Bundle]] = []
        for role in self._backends:
            if role in self._topology.own:
                self._bundles[role] = self._taken(role)
            else:
                shared = shared or self._taken(role)
                self._bundles[role] = shared

    def roles(self) -> Iterator[tuple[str, str]]:
        """Yield pairs: Ray's id of a node, and the role of a model on it."""
        for role, nodes in self._bundles.items():
            for bundles in nodes:
                yield bundles[0].node, role

    def begin(self) -> None:
        """Start all processes, and begin to build the models that do not share devices."""
        num_sharing = sum(role not in self._topology.own for role in self._backends)
        for role, backend in self._backends.items():
            num_gpus = self._topology.device.gpu_share(1 if role in self._topology.own else num_sharing)
            nodes, section = self._bundles[role], backend.section
            self._groups[role] = ModelGroup(self._processes, nodes, role=role, section=section, num_gpus=num_gpus)
        for role in self._side_by_side():
            self._build(role)

    def build_in_turns(self) -> None:
        """Build the models that share devices, each when the one before has left them."""
        for role in self._backends:
            if self._topology.takes_turns(role):
                self._build(role)
                model = self._finished(role, partial(self._residency.hold, role))
                model.offload()
                self._residency.join(role, Tenant(model.offload, model.onload))

    def finish(self) -> dict[str, RemoteModel]:
        """Wait until all models are built, and return them by role."""
        for role in self._side_by_side():
            self._finished(role, nullcontext)
        return {role: self._models[role] for role in self._backends}

    def monitored(self) -> list[Monitored]:
        """Return the ranks of all models, for readings."""
        return [worker for group in tuple(self._groups.values()) for worker in group.monitored()]

    def group(self, role: str) -> ModelGroup:
        """Return the placed ranks of a model."""
        return self._groups[role]

    def _side_by_side(self) -> list[str]:
        return [role for role in self._backends if not self._topology.takes_turns(role)]

    def _taken(self, role: str) -> list[list[Bundle]]:
        devices = self._topology.devices(role)
        bundles = self._processes.cluster.reserve(devices.num_nodes, devices.ranks)
        self._stack.callback(self._processes.cluster.release, bundles)
        return bundles

    def _build(self, role: str) -> None:
        backend = self._backends[role]
        columns = (ROUTED_EXPERTS,) if backend.replays_routing else ()
        self._groups[role].begin(backend.plugin, backend.config, backend.backend, backend.spec, columns=columns)

    def _finished(self, role: str, hold: Callable[[], AbstractContextManager[None]]) -> RemoteModel:
        model = self._groups[role].finish(hold)
        self._stack.callback(model.close)
        self._models[role] = model
        return model
