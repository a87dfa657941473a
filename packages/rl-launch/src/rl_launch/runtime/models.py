"""The models of a run: placed, built and handed out by role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

from rl_core.ray.model import RemoteModel
from rl_core.rollouts.group import ROUTED_EXPERTS
from rl_launch.backends import ModelBackend
from rl_launch.cluster.virtual_cluster import Bundle, VirtualCluster, WorkerProcess
from rl_launch.monitoring.poller import Monitored
from rl_launch.placement.residency import Residency, Tenant
from rl_launch.placement.topology import Topology
from rl_launch.runtime.model_group import ModelGroup, StartTimeouts
from rl_launch.runtime.processes import Processes

Hold = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a model has the devices that it shares."""


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
        topology: Devices of the run.
        cluster: The started cluster.
        processes: Processes of their workers.
        residency: Residency of the shared devices.
        logs: Folder of their logs.
        timeouts: Startup timeouts.
        stack: Closes the models and gives their devices back.
    """

    def __init__(
        self,
        backends: Mapping[str, ModelBackend],
        topology: Topology,
        cluster: VirtualCluster,
        processes: Processes,
        *,
        residency: Residency,
        logs: str,
        timeouts: StartTimeouts,
        stack: ExitStack,
    ) -> None:
        self._backends = dict(backends)
        self._topology = topology
        self._cluster = cluster
        self._processes = processes
        self._residency = residency
        self._logs = logs
        self._timeouts = timeouts
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
        """Ray's id of a node, and the role of a model on it."""
        for role, nodes in self._bundles.items():
            for bundles in nodes:
                yield bundles[0].node, role

    def begin(self) -> None:
        """Start all processes, and begin to build the models that do not share devices."""
        self._groups = {role: self._placed(role) for role in self._backends}
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
        """The models by role, once all are built."""
        for role in self._side_by_side():
            self._finished(role, nullcontext)
        return {role: self._models[role] for role in self._backends}

    def monitored(self) -> list[Monitored]:
        """The ranks of all models, for readings."""
        return [worker for group in tuple(self._groups.values()) for worker in group.monitored()]

    def group(self, role: str) -> ModelGroup:
        """The ranks of a model, placed."""
        return self._groups[role]

    def _side_by_side(self) -> list[str]:
        return [role for role in self._backends if not self._topology.takes_turns(role)]

    def _taken(self, role: str) -> list[list[Bundle]]:
        devices = self._topology.devices(role)
        bundles = self._cluster.reserve(devices.num_nodes, devices.ranks)
        self._stack.callback(self._cluster.release, bundles)
        return bundles

    def _placed(self, role: str) -> ModelGroup:
        sharing = 1 if role in self._topology.own else sum(other not in self._topology.own for other in self._backends)
        num_gpus, ranks = self._topology.device.gpu_share(sharing), self._topology.devices(role).ranks

        def process(node: str, rank: int, name: str) -> WorkerProcess:
            return self._processes.on(node, role, num_gpus=num_gpus, ranks=ranks, number=rank, name=name)

        return ModelGroup(
            self._cluster,
            self._bundles[role],
            process,
            role=role,
            section=self._backends[role].section,
            logs=self._logs,
            timeouts=self._timeouts,
        )

    def _build(self, role: str) -> None:
        backend = self._backends[role]
        columns = (ROUTED_EXPERTS,) if backend.replays_routing else ()
        self._groups[role].begin(backend.plugin, backend.config, backend.backend, backend.spec, columns=columns)

    def _finished(self, role: str, hold: Hold) -> RemoteModel:
        model = self._groups[role].finish(hold)
        self._stack.callback(model.close)
        self._models[role] = model
        return model
