"""Steps of a run in simulated time: the product's own source of rollouts and dispatch, on engines that are scripted.

A replica decodes so many rollouts at a time, each at one speed, and queues the others. Lengths are drawn from given
ones, or are log-normal with a 99th percentile of eight times the median. Training takes a fixed time. A weight update
either lets the rollouts that have begun end, or interrupts them for a moment and goes on.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import Sampler
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup, RolloutReports
from rl_core.rollouts.pool import RolloutTask, Ticket
from rl_core.rollouts.rollout import Prompt, StopReason
from rl_core.weights import WeightUpdate
from rl_launch.runtime.rollout_pool import GroupDispatch

SKEW = 8.0
"""99th percentile of the lengths over their median."""

SIGMA = math.log(SKEW) / 2.3263
"""Deviation of the logarithm of such a length."""


@dataclass(frozen=True)
class Engines:
    """The scripted engines.

    Args:
        replicas: Number of replicas.
        slots: Number of rollouts that a replica decodes at a time.
        median_tokens: Median length of a rollout.
        max_tokens: Maximum length of a rollout.
        seconds_per_token: Duration of a token of each rollout, whatever else is decoded.
        update_seconds: Duration of a weight update in flight.
        lengths: Tokens of rollouts to draw from; empty for the log-normal ones.
        seconds_per_rollout: Duration of each rollout besides its tokens.
    """

    replicas: int
    slots: int
    median_tokens: int
    max_tokens: int
    seconds_per_token: float
    update_seconds: float
    lengths: tuple[int, ...] = ()
    seconds_per_rollout: float = 0.0

    @cached_property
    def _given(self) -> np.ndarray:
        return np.asarray(self.lengths)

    def tokens(self, seeds: Sequence[int]) -> np.ndarray:
        """Return the tokens of each rollout of a group."""
        if self.lengths:
            return np.random.default_rng(seeds[0]).choice(self._given, size=len(seeds))
        normal = np.random.default_rng(seeds[0]).normal(size=len(seeds))
        tokens = np.minimum(self.median_tokens * np.exp(SIGMA * normal), self.max_tokens)
        return np.ceil(tokens).astype(np.int64)

    def seconds(self, seeds: Sequence[int]) -> np.ndarray:
        """Seconds of each rollout of a group."""
        return self.tokens(seeds) * self.seconds_per_token + self.seconds_per_rollout

    def mean_tokens(self) -> float:
        """Mean tokens of a rollout."""
        return float(self.tokens(range(200_000)).mean())

    def longest_seconds(self) -> float:
        """Seconds of a rollout that runs into the limit, as some of every step do."""
        return max(self.lengths, default=self.max_tokens) * self.seconds_per_token + self.seconds_per_rollout


@dataclass(frozen=True)
class SimulatedSteps:
    """The steps of a simulated run.

    Args:
        prompts: Prompts of a step.
        group: Rollouts of a prompt.
        steps: Number of steps.
    """

    prompts: int
    group: int
    steps: int


class Script:
    """Simulated time, the groups that will end, and the CPU seconds that the script itself takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_seconds = 0.0
        self.ends: list[tuple[float, Ticket, ScriptedReplica]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the CPU seconds of what is inside as the script's."""
        began = time.process_time()
        yield
        self.cpu_seconds += time.process_time() - began


class ScriptedReplica:
    """A replica that ends each rollout after its seconds; those beyond its slots wait."""

    def __init__(self, script: Script, engines: Engines) -> None:
        self._script, self._engines = script, engines
        self._free_at = [0.0] * engines.slots

    def begin(self, tasks: Sequence[tuple[Ticket, RolloutTask]]) -> None:
        """Begin groups."""
        with self._script.measured():
            for ticket, task in tasks:
                heapq.heappush(
                    self._script.ends, (max(map(self._end, self._engines.seconds(task.seeds))), ticket, self)
                )

    def stop(self, seconds: float) -> None:
        """Let all that it decodes end so much later."""
        self._free_at = [max(self._script.now, each) + seconds for each in self._free_at]

    def _end(self, seconds: float) -> float:
        end = max(self._script.now, heapq.heappop(self._free_at)) + seconds
        heapq.heappush(self._free_at, end)
        return end

    def __lt__(self, other: ScriptedReplica) -> bool:
        return id(self) < id(other)


class ScriptedPool:
    """A `RolloutPool` of scripted replicas.

    Args:
        in_flight: True if rollouts continue after a weight update, False if they end before it.
    """

    def __init__(self, script: Script, engines: Engines, *, in_flight: bool) -> None:
        self._script, self._engines, self._in_flight = script, engines, in_flight
        # They begin groups, which is all that the dispatch asks for here.
        self._replicas: list[Any] = [ScriptedReplica(script, engines) for _ in range(engines.replicas)]
        self.num_lost = 0
        self._dispatch = GroupDispatch()
        self._version = 0
        self.most_under_way = 0

    def submit(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Begin groups."""
        tickets = self._dispatch.add(tasks)
        self._dispatch.assign_waiting(self._replicas)
        self.most_under_way = max(self.most_under_way, self._dispatch.num_groups)
        return tickets

    def next_done(self) -> tuple[Ticket, RolloutGroup]:
        """Return the group that ends next, at its time."""
        self._dispatch.assign_waiting(self._replicas)
        with self._script.measured():
            end, ticket, replica = heapq.heappop(self._script.ends)
            self._script.now = max(self._script.now, end)
        (task,) = self._dispatch.end(cast("Any", replica), [ticket])
        with self._script.measured():
            return ticket, self._group(task)

    def adopt(self, update: WeightUpdate, *, in_flight: bool = False) -> None:
        """Bring the replicas to the version, once what has begun has ended, or at once."""
        with self._script.measured():
            self._version = update.version
            if self._in_flight:
                self._script.now += self._engines.update_seconds
            elif self._script.ends:
                self._script.now = max(self._script.now, *(end for end, _, _ in self._script.ends))

    def stop(self, seconds: float) -> None:
        """Give the devices to the training for a time, in which no rollout continues."""
        with self._script.measured():
            for replica in self._replicas:
                replica.stop(seconds)
            self._script.ends = [
                (max(self._script.now, end) + seconds, ticket, replica) for end, ticket, replica in self._script.ends
            ]

    def resize(self, num_replicas: int) -> None:
        """Have replicas die or join until there are so many; what the dead had is done again by others."""
        while len(self._replicas) < num_replicas:
            self._replicas.append(ScriptedReplica(self._script, self._engines))
        while len(self._replicas) > num_replicas:
            replica = self._replicas.pop()
            self.num_lost += self._dispatch.num_under_way(replica)
            self._dispatch.give_up(replica)
            self._script.ends = [end for end in self._script.ends if end[2] is not replica]
        heapq.heapify(self._script.ends)

    @property
    def num_replicas(self) -> int:
        """Number of scripted replicas."""
        return len(self._replicas)

    def idle_share(self) -> None:
        """Nothing: the script does not measure it."""

    def speculation(self) -> None:
        """Nothing: no engine drafts."""

    def _group(self, task: RolloutTask) -> RolloutGroup:
        count, lengths = len(task.seeds), tuple(self._engines.tokens(task.seeds).tolist())
        stop_reason: StopReason = "stop"
        reports = RolloutReports(
            prompt_id=task.prompt.id,
            num_tokens=tuple(length + 1 for length in lengths),
            num_sampled=lengths,
            num_turns=(1,) * count,
            spans=tuple(((self._version, length),) for length in lengths),
            rewards=({"reward": 1.0},) * count,
            stop_reason=(stop_reason,) * count,
            status=cast("Any", ("ok",) * count),
            failure=("",) * count,
            info=({},) * count,
        )
        return RolloutGroup(task.prompt, reports, EMPTY)


EMPTY = RolloutGroup.of(Prompt("", (), np.zeros(1, np.int32), ""), []).columns


@dataclass(frozen=True)
class Measured:
    """A simulated run.

    Args:
        step_seconds: Simulated duration of a step; the first is left out.
        idle: Share of it in which nothing was trained.
        most_under_way: Maximum number of rollouts at a time, in progress or waiting.
        cpu_seconds: Processor time of the driver for 1,000 finished rollouts.
        first_length: Mean tokens of the rollouts that the first step trained on.
        later_length: Mean tokens of those of the later steps.
        carried_share: Share of the groups of a later step that an earlier one began.
        carried_length: Mean tokens of their rollouts over the mean of the others; NaN if there are none.
    """

    step_seconds: float
    idle: float
    most_under_way: int
    cpu_seconds: float
    first_length: float
    later_length: float
    carried_share: float
    carried_length: float


@dataclass(frozen=True)
class Setting:
    """A case of the simulation.

    Args:
        train_seconds: Duration of training in a step.
        staleness: Staleness limit of the source.
        in_flight: True if rollouts continue after a weight update, False if they end before it.
        ratio: Number of prompts in progress over the prompts of a step; None for as many as the staleness allows.
        takes_turns: True if generation stops while the policy trains.
        sampler: Which groups a step trains on.
        window: Number of prompts that the sampler `windowed` chooses from, over the prompts of a step.
    """

    train_seconds: float
    staleness: int
    in_flight: bool = False
    ratio: float | None = None
    takes_turns: bool = False
    sampler: Sampler = "weight_fifo"
    window: float = 1.5

    @property
    def name(self) -> str:
        """In the table."""
        if self.takes_turns:
            return f"over-sampling {self.ratio:g}, staleness {self.staleness}"
        return f"staleness {self.staleness}, {'in flight' if self.in_flight else 'drained'}"

    def bound(self, engines: Engines, generation: float) -> float:
        """Return the seconds below which no schedule can bring a step above staleness 0.

        Args:
            engines: The replicas.
            generation: Seconds of a step's rollouts at full occupancy.
        """
        training, longest = self.train_seconds, engines.longest_seconds()
        if self.takes_turns:
            return training + max(generation, longest / (self.staleness + 1))
        if not self.in_flight:
            return max(training, generation, longest)
        wait = max(0.0, longest - self.staleness * training) / (self.staleness + 1)
        return max(training + wait, generation)


def steps_of(
    chosen: SimulatedSteps, script: Script, pool: ScriptedPool, setting: Setting
) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Simulate a run; yields the number of each step at its end, and what the source measured of it."""
    prompts = [Prompt(f"p{index}", (), np.zeros(1, np.int32), "scripted") for index in range(4 * chosen.prompts)]
    source = PacedRolloutSource(
        cast("Any", pool),
        Stream([prompts]),
        sampling=SamplingParams(1),
        num_generations=chosen.group,
        seed=0,
        max_staleness=setting.staleness,
        prompts_per_step=chosen.prompts,
        num_ahead=None if setting.ratio is None else math.ceil((setting.ratio - 1) * chosen.prompts),
        sampler=setting.sampler,
        window=math.ceil(setting.window * chosen.prompts),
        overlaps_training=not setting.takes_turns,
        clock=lambda: script.now,
    )
    source.adopt(WeightUpdate(1))
    for step in range(1, chosen.steps + 1):
        groups = source.collect(chosen.prompts)
        measured = source.metrics()
        with script.measured():
            length = float(np.mean([group.rollouts.num_sampled for group in groups]))
        if setting.takes_turns:
            pool.stop(setting.train_seconds)
        script.now += setting.train_seconds
        source.adopt(WeightUpdate(step + 1))
        yield step, {**measured, "length": length}


def simulate(chosen: SimulatedSteps, engines: Engines, setting: Setting) -> Measured:
    """Return what is measured of a simulated run.

    Args:
        chosen: Its steps, at least two.
        engines: Its replicas.
        setting: How training and generation alternate.
    """
    script = Script()
    pool = ScriptedPool(script, engines, in_flight=setting.in_flight)
    began_cpu, first = time.process_time(), 0.0
    measured = []
    for _, metrics in steps_of(chosen, script, pool, setting):
        first = first or script.now
        measured.append(metrics)
    cpu = time.process_time() - began_cpu - script.cpu_seconds
    rollouts = chosen.steps * chosen.prompts * chosen.group
    seconds = (script.now - first) / (chosen.steps - 1)
    idle = max(0.0, 1 - setting.train_seconds / seconds)
    later = measured[1:]
    share = float(np.mean([step.get("carried/share", 0.0) for step in later]))
    lengths = [(step.get("carried/mean_length"), step.get("carried/mean_length_of_others")) for step in later]
    ratios = [carried / others for carried, others in lengths if carried and others]
    return Measured(
        seconds,
        idle,
        pool.most_under_way * chosen.group,
        1000 * cpu / rollouts,
        measured[0]["length"],
        float(np.mean([step["length"] for step in later])),
        share,
        float(np.mean(ratios)) if ratios else math.nan,
    )


@dataclass(frozen=True)
class Faults:
    """Failures of devices and what they cost.

    Args:
        devices: Devices whose failure ends the step of the trainer.
        replicas: Replicas of generation, which are replaced without a restart of the trainer.
        hours_between: Mean hours between two failures of one device.
        restart_seconds: Seconds from a failure of the trainer until it trains again from its last checkpoint.
        replica_seconds: Seconds until a replica is replaced.
    """

    devices: int
    replicas: int
    hours_between: float
    restart_seconds: float
    replica_seconds: float


@dataclass(frozen=True)
class Goodput:
    """A simulated run with failures.

    Args:
        goodput: Share of the time that went into steps which were not done again.
        lost_by_fault: Mean seconds that a failure of the trainer cost.
        num_faults: Failures of the trainer.
        num_replica_faults: Failures of replicas.
    """

    goodput: float
    lost_by_fault: float
    num_faults: int
    num_replica_faults: int


def best_save_seconds(save_seconds: float, faults: Faults) -> float:
    """Return the seconds between two saves at which least is lost, to first order (Young 1974)."""
    return math.sqrt(2 * save_seconds * faults.hours_between * 3600 / faults.devices)


def goodput(
    step_seconds: float, save_seconds: float, save_period: int, faults: Faults, *, hours: float, seed: int = 0
) -> Goodput:
    """Simulate the steps of a run with failures by rate.

    A failure of the trainer's devices loses the steps since the last checkpoint, which are done again after a restart.
    A replica that fails slows the steps in proportion to the replicas that are left until it is replaced.

    Args:
        step_seconds: Seconds of a step without failures.
        save_seconds: Seconds for which a save holds up training.
        save_period: Steps between two saves.
        faults: Failures.
        hours: Simulated hours.
        seed: Seed of the failures.
    """
    random, end = np.random.default_rng(seed), hours * 3600
    between = faults.hours_between * 3600

    def next_failure(count: int) -> float:
        return float(random.exponential(between / count)) if count else math.inf

    now, kept, unsaved, lost = 0.0, 0, 0, 0.0
    trainer, replica = next_failure(faults.devices), next_failure(faults.replicas)
    away: list[float] = []
    num_faults = num_replica_faults = 0
    while now < end:
        while replica <= now:
            num_replica_faults += 1
            away.append(replica + faults.replica_seconds)
            replica += next_failure(faults.replicas)
        away = [back for back in away if back > now]
        slower = faults.replicas / max(1, faults.replicas - len(away)) if faults.replicas else 1.0
        done = now + step_seconds * slower
        saves = (unsaved + 1) % save_period == 0
        if trainer < done + save_seconds * saves:
            num_faults += 1
            lost += unsaved * step_seconds + (trainer - now) + faults.restart_seconds
            unsaved, now = 0, trainer + faults.restart_seconds
            trainer = now + next_failure(faults.devices)
            continue
        now, unsaved = done + save_seconds * saves, unsaved + 1
        if saves:
            kept, unsaved = kept + unsaved, 0
    useful = (kept + unsaved) * step_seconds
    return Goodput(useful / now, lost / num_faults if num_faults else 0.0, num_faults, num_replica_faults)
