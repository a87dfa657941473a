"""Starting all ranks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import ray

from rl_core.config import Config
from rl_core.errors import Origin
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_core.plugins import BackendPlugin
from rl_core.ray.calls import gather
from rl_core.ray.host import Place
from rl_core.ray.model import CALL_TIMEOUT_S, RemoteModel
from rl_launch.cluster.start_wait import Bound, gather_start
from rl_launch.cluster.virtual_cluster import Bundle, VirtualCluster, WorkerProcess
from rl_launch.monitoring.poller import Monitored


@dataclass(frozen=True)
class StartTimeouts:
    """Bounds of starting workers.

    Args:
        process_s: An empty process.
        model_s: Building and loading a model.
    """

    process_s: float
    model_s: float

    @property
    def process(self) -> Bound:
        """Bound of starting an empty process, with its key."""
        return Bound(self.process_s, "cluster.process_timeout_s")

    @property
    def model(self) -> Bound:
        """Bound of building and loading a model, with its key."""
        return Bound(self.model_s, "cluster.start_timeout_s")


class ModelGroup:
    """All ranks of a model, placed; `finish` waits until the model is built.

    Placing and building are two steps so that other workers can start beside the ranks while these load.

    Args:
        cluster: Where the ranks run.
        nodes: A bundle per rank, by node.
        process: How a rank's process is made, by Ray's id of its node, its rank and its name.
        role: Role of the model, for messages.
        section: Dotted key of the model's config section, for messages.
        logs: Folder for the ranks' logs.
        timeouts: Startup timeouts.

    Raises:
        RLError: If a process does not start, with role and rank.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        nodes: Sequence[Sequence[Bundle]],
        process: Callable[[str, int, str], WorkerProcess],
        *,
        role: str,
        section: str,
        logs: str,
        timeouts: StartTimeouts,
    ) -> None:
        self._timeouts = timeouts
        self._device = cluster.device.name
        self._role = role
        self._section = section
        self._local_ranks = [local_rank for node in nodes for local_rank, _ in enumerate(node)]
        self._workers = [
            cluster.start_worker(process(bundle.node, rank, f"{role}-{rank}"), bundle)
            for rank, bundle in enumerate(bundle for node in nodes for bundle in node)
        ]
        unplaced = [Origin(role, rank, "its node", "start", section) for rank in range(len(self._workers))]
        self.places: list[Place] = gather_start(
            [w.place.remote() for w in self._workers], unplaced, timeouts.process, f"the processes of {role}"
        )
        self._logs = [f"{logs}/{role}-{rank}.log" for rank in range(len(self._workers))]
        gather_start(
            [worker.log_to.remote(path) for worker, path in zip(self._workers, self._logs, strict=True)],
            self._origins("start"),
            timeouts.process,
            f"the logs of {role}",
        )
        self._timeout_s = CALL_TIMEOUT_S
        self._trains = True
        self._columns: tuple[str, ...] = ()
        self._builds: list[ray.ObjectRef] = []

    def begin(
        self,
        plugin: BackendPlugin,
        config: ModelConfig,
        backend: Config,
        spec: ModelSpec,
        *,
        columns: Sequence[str],
    ) -> None:
        """Connect the ranks to rank 0 and build the model.

        Args:
            plugin: Backend that builds the model.
            config: Section of the model.
            backend: Settings of the backend.
            spec: Head of the model, and whether it trains.
            columns: Columns that all its passes read in addition to `tokens`.
        """
        self._columns = tuple(columns)
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
        """The model, once all ranks have built it; raises the first failure of any, with role, rank and node."""
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
        """The ranks, for readings."""
        return [
            Monitored(f"{self._role}-{rank}", self._role, rank, place.node, worker, place.gpus)
            for rank, (worker, place) in enumerate(zip(self._workers, self.places, strict=True))
        ]

    def meeting_point(self) -> str:
        """`host:port` on rank 0's node, the port kept free for rank 0."""
        place = gather([self._workers[0].place.remote()], self._origins("weight sync")[:1], self._timeouts.process_s)[0]
        return f"{place.address}:{place.port}"

    def _origins(self, phase: str) -> list[Origin]:
        return [Origin(self._role, rank, place.address, phase, self._section) for rank, place in enumerate(self.places)]
