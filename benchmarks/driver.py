"""Seconds of the driver in a GRPO step of 10,000 rollouts on 64 workers, by phase and by thread.

    python benchmarks/driver.py [--tokens 256 4096] [--together 1]

The driver's side is the product's own: the GRPO loop, the stream of prompts, the pool of replicas, the facade of a
model of many ranks, Ray, the run session with its files. The workers (56 policy ranks and 8 replicas) are Ray actors
that compute nothing (`simulated_workers.py`); several share a process, so that a small machine can hold them. Weights
are not moved.
Driver seconds are CPU seconds of the driver's process, without its waits; they hardly depend on other work of the
machine. They are those of the loop's thread, of the thread that writes rollouts, and of Ray's own threads.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
from measurement import seconds, surroundings, table

from rl_algos.data.stream import Stream
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.estimators import advantages_of
from rl_algos.grpo.loop import train
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.training.batch import build_batch, with_advantages
from rl_algos.rollouts.training.metrics import rollout_metrics, signal_metrics
from rl_core.data.batch import Batch
from rl_core.devices import device_named
from rl_core.errors import FailureOrigin
from rl_core.metrics import Metric
from rl_core.model import Coordinates, Model
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt
from rl_core.run import Checkpointable, Run
from rl_core.testing.fakes import FakeModel, FakeWeights
from rl_core.weights import WeightUpdate
from rl_launch.cluster.virtual_cluster import VirtualCluster, WorkerProcess
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session import RunSession

PROMPT_TOKENS = 64
UPDATES = 4
STEP = "step"
"""Key of a whole step among its phases."""

WRITER = "rollout-files"
"""Prefix of the name of the thread that writes rollouts."""


@dataclass(frozen=True)
class Seconds:
    """Wall seconds, and CPU seconds of the driver: of all threads, of the loop's and of the one that writes."""

    wall: float = 0.0
    driver: float = 0.0
    loop: float = 0.0
    writer: float = 0.0

    @classmethod
    def now(cls) -> Seconds:
        """Return the seconds since fixed points in the past; called in the loop's thread."""
        return cls(time.perf_counter(), time.process_time(), time.thread_time(), _writer_seconds())

    @property
    def ray(self) -> float:
        """CPU seconds of all other threads, which are Ray's."""
        return self.driver - self.loop - self.writer

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.wall + other.wall, self.driver + other.driver, self.loop + other.loop, self.writer + other.writer
        )

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.wall - other.wall, self.driver - other.driver, self.loop - other.loop, self.writer - other.writer
        )


def _writer_seconds() -> float:
    writers = [thread.ident for thread in threading.enumerate() if thread.name.startswith(WRITER)]
    clocks = [time.pthread_getcpuclockid(ident) for ident in writers if ident is not None]
    return sum(time.clock_gettime(clock) for clock in clocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64, help="simulated workers, replicas included (%(default)s)")
    parser.add_argument("--replicas", type=int, default=8, help="replicas among them (%(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="processes that host the workers (%(default)s)")
    parser.add_argument("--prompts", type=int, default=625, help="prompts of a step (%(default)s)")
    parser.add_argument("--group", type=int, default=16, help="rollouts per prompt (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 4096], help="tokens of each rollout; a table for each number"
    )
    parser.add_argument(
        "--together", type=int, default=1, help="groups that finish together; 1 costs the driver most (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one that is not (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: 400 rollouts, 1 process, 2 steps")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.prompts, chosen.group, chosen.processes, chosen.steps = 100, 4, 1, 2
    rollouts = chosen.prompts * chosen.group
    if rollouts % UPDATES or not 0 < chosen.replicas < chosen.workers or chosen.processes < 1:
        parser.error(f"--prompts x --group must be a multiple of {UPDATES}, and --replicas fewer than --workers")
    print(surroundings("rl-algos", "rl-core", "rl-launch", "ray"))
    print(
        f"{chosen.workers - chosen.replicas} policy ranks and {chosen.replicas} replicas, simulated in "
        f"{chosen.processes} processes; {rollouts} rollouts, {UPDATES} updates a step; medians of {chosen.steps} steps"
    )
    for tokens in chosen.tokens:
        with (
            tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch,
            VirtualCluster(device=device_named("cpu"), num_nodes=1, ranks_per_node=1) as cluster,
        ):
            run = measured_steps(cluster, Path(scratch) / "run", tokens, chosen)
        print(f"\n{tokens} tokens in each rollout\n\n{breakdown(run)}", flush=True)


class MeasuredRun:
    """A run session that notes wall and CPU seconds of every phase of every step."""

    def __init__(self, session: Run) -> None:
        self._session = session
        self.found: list[dict[str, Seconds]] = []
        self.last: tuple[Sequence[RolloutGroup], np.ndarray] = ((), np.zeros(0))
        self._times: dict[str, Seconds] = {}

    def steps(
        self, max_steps: int, *, models: Mapping[str, Model], state: Mapping[str, Checkpointable]
    ) -> Iterator[int]:
        """See the session; work between two steps counts to the first of them."""
        inner = self._session.steps(max_steps, models=models, state=state)
        return self._iterate(inner)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See the session."""
        with self._timed(name), self._session.phase(name):
            yield

    def record(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """See the session."""
        self._session.record(step, metrics)

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, batch: Batch | None = None
    ) -> None:
        """See the session."""
        self.last = groups, advantages
        with self._timed("recording"):
            self._session.record_rollouts(step, groups, advantages, batch=batch)

    def record_validation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """See the session."""
        self._session.record_validation(step, groups)

    def due(self, period: int, step: int, *, at_end: bool = False) -> bool:
        """See the session."""
        return self._session.due(period, step, at_end=at_end)

    def stop(self, reason: str) -> None:
        """See the session."""
        self._session.stop(reason)

    def _iterate(self, inner: Iterator[int]) -> Iterator[int]:
        while True:
            self._times = {}
            with self._timed(STEP):
                step = next(inner, None)
                if step is None:
                    return
                yield step
            self.found.append(self._times)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        before = Seconds.now()
        yield
        self._times[name] = self._times.get(name, Seconds()) + (Seconds.now() - before)


class SimulatedRank:
    """One rank's actor handle, as a model's facade calls it; its process stands for others too."""

    def __init__(self, host: Any, rank: int, num_ranks: int) -> None:
        self._host = host
        self._coordinates = Coordinates({"dp": rank}, {"dp": num_ranks})

    @property
    def call(self) -> SimulatedRank:
        """The object with the method `remote`."""
        return self

    def remote(self, method: str) -> Any:
        """Return its place on the mesh, which the shared process does not know."""
        import ray

        assert method == "coordinates"
        return ray.put(self._coordinates)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


def replicas(hosts: Sequence[Any]) -> list[Any]:
    """Return replicas that are started already, one on each host."""
    from rl_launch.runtime.processes import StartTimeouts
    from rl_launch.runtime.replica import Replica

    class SimulatedReplicaProcess(Replica):
        def __init__(self, host: Any, index: int) -> None:
            super().__init__(lambda: host, None, {}, index=index, logs="", timeouts=StartTimeouts(300.0, 300.0))  # type: ignore[arg-type]  # nothing is built of a spec
            self.actor = host

    return [SimulatedReplicaProcess(host, index) for index, host in enumerate(hosts)]


class NoTransfer:
    """Sends nothing: simulated replicas have no weights."""

    def send(self, update: WeightUpdate, replicas: Sequence[Any], *, in_flight: bool = False) -> None:
        """Leave the replicas as they are."""


M = TypeVar("M", bound=MeasuredRun)


def measured_steps(
    cluster: VirtualCluster,
    run_dir: Path,
    tokens: int,
    chosen: argparse.Namespace,
    measured: Callable[[RunSession], M] = MeasuredRun,  # type: ignore[assignment]  # the default of M
    stream: Stream[Prompt] | None = None,
) -> M:
    """Run the loop.

    Args:
        cluster: Cluster of one node.
        run_dir: Run directory.
        tokens: Tokens of each rollout.
        chosen: Sizes, as the command line gives them.
        measured: Makes the run that the loop sees.
        stream: Prompts; `prompts(chosen.prompts)` if unset.
    """
    from rl_core.ray.calls import gather
    from rl_core.ray.model import RemoteModel
    from rl_launch.runtime.rollout_pool import ReplicaPool

    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = WorkerProcess(sys.executable, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    (bundles,) = cluster.reserve(1, 1)
    rank_hosts = [cluster.start_worker(process, bundles[0]) for _ in range(chosen.processes)]
    replica_hosts = [cluster.start_async_worker(process) for _ in range(chosen.replicas)]
    started = [host.build.remote("simulated_workers:SimulatedRanks") for host in rank_hosts]
    started += [
        host.start.remote("simulated_workers:SimulatedReplica", tokens, chosen.together) for host in replica_hosts
    ]
    gather(started, [FailureOrigin("simulated worker", index, "", "start") for index in range(len(started))], 300.0)

    num_ranks = chosen.workers - chosen.replicas
    ranks = [SimulatedRank(rank_hosts[rank % len(rank_hosts)], rank, num_ranks) for rank in range(num_ranks)]
    policy = RemoteModel(ranks, role="policy", nodes=["here"] * num_ranks)
    pool = ReplicaPool(replicas(replica_hosts), None, stall_timeout_s=600.0, weights=NoTransfer())
    config = GRPOConfig(
        num_prompts_per_step=chosen.prompts, num_generations_per_prompt=chosen.group, max_num_steps=chosen.steps + 1
    )
    sampling = SamplingParams(tokens)
    given = stream or Stream([prompts(chosen.prompts)])
    source = PacedRolloutSource(pool, given, sampling=sampling, num_generations=chosen.group, seed=0)
    settings = read_plan("grpo-arithmetic", ["checkpointing.enabled=false"]).config
    with RunSession(run_dir, settings, title="driver") as session:
        session.write_rollouts_by(pool.write_rollouts)
        run = measured(session)
        steps = RolloutSteps(config, source, FakeWeights(FakeModel()), Validation((), sampling, config), run)
        rows = chosen.prompts * chosen.group // UPDATES
        train(config, Objective(PolicyLoss()), policy=policy, steps=steps, rows_per_minibatch=rows)
    run.found = run.found[1:]
    return run


def prompts(count: int) -> list[Prompt]:
    """Return prompts of 64 tokens and about as many words."""
    text = "a word and another " * (PROMPT_TOKENS // 4)
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    message = {"role": "user", "content": text}
    return [Prompt(f"p{index}", (message,), tokens + index, "math", {"answer": "1"}) for index in range(count)]


def breakdown(run: MeasuredRun) -> str:
    """Return the table: phases, then the time outside them and its largest parts, each run once more by itself."""
    names = [name for name in run.found[0] if name != STEP]
    rows = [_row(name.replace("_", " "), [times[name] for times in run.found]) for name in names]
    within = [sum((times[name] for name in names), Seconds()) for times in run.found]
    rows.append(_row("outside phases", [times[STEP] - spent for times, spent in zip(run.found, within, strict=True)]))
    groups, advantages = run.last
    config = GRPOConfig()
    for name, work in {
        "advantages": lambda: advantages_of(groups, config),
        "batch": lambda: with_advantages(build_batch(groups, config), advantages),
        "metrics": lambda: {**rollout_metrics(groups, advantages), **signal_metrics(groups, [])},
    }.items():
        rows.append(_row(f"- {name}, alone", [_once(work) for _ in run.found]))
    rows.append(_row("whole step", [times[STEP] for times in run.found]))
    return table(["", "wall, s", "driver, s", "loop, s", "Ray, s", "writing, s"], rows)


def _once(work: Callable[[], object]) -> Seconds:
    before = Seconds.now()
    work()
    return Seconds.now() - before


def _row(name: str, times: Sequence[Seconds]) -> tuple[str, ...]:
    values: list[Callable[[Seconds], float]] = [
        lambda each: each.wall,
        lambda each: each.driver,
        lambda each: each.loop,
        lambda each: each.ray,
        lambda each: each.writer,
    ]
    return name, *(seconds(median(map(value, times))) for value in values)


if __name__ == "__main__":
    main()
