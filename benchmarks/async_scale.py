"""Steps of an asynchronous run on 512 replicas, in simulated time, beside the synchronous run and the bound.

    python benchmarks/async_scale.py [--replicas 512] [--train-seconds 200 265 330] [--changing 24 12 24]

The source of rollouts, its ledger and the dispatch of groups to replicas are the product's own. Engines are scripted: a
replica decodes so many rollouts at a time, each at one speed, and queues the others. Lengths are log-normal with a
99th percentile of eight times the median, cut off at the limit of tokens. Training takes a fixed time; between two
calls nobody deals groups to replicas, as in a run. A weight update either lets the rollouts that have begun end
(`drained`), or interrupts them for a moment and goes on (`in flight`).

No schedule can make steps shorter than their bound, which is the largest of

- the training, T;
- the generation at full occupancy of all replicas;
- the longest rollout, L, if updates wait for it;
- otherwise `T + max(0, L - K T) / (K + 1)` at staleness K: a rollout begins with the step's wait for rollouts at the
  earliest, and K trainings and K + 1 such waits later it is due. If generation and training take turns, rollouts stop
  during a training, and it is `T + L / (K + 1)`.

Further tables show steps that end at their last finished group (over-sampling), on devices where generation and
training take turns, and the samplers of an asynchronous run. Beside the seconds of a step they have the bias of
lengths: the mean length of the rollouts that trained over the mean of their distribution, in the first step and in the
later ones, and the mean length of the rollouts that an earlier step began over the mean of the others.

The last table is one run of few replicas that are the slower side. Some of them go after a third of its steps, with all
that they had under way, and as many join after two.

Seconds are simulated; CPU seconds are those of the driver's own code, without the script's.
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from measurement import surroundings, table

from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import Sampler
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup, RolloutReports
from rl_core.rollouts.pool import RolloutTask, Ticket
from rl_core.rollouts.rollout import Prompt, Status, StopReason
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
    """

    replicas: int
    slots: int
    median_tokens: int
    max_tokens: int
    seconds_per_token: float
    update_seconds: float

    def tokens(self, seeds: Sequence[int]) -> np.ndarray:
        """Return the tokens of each rollout of a group."""
        normal = np.random.default_rng(seeds[0]).normal(size=len(seeds))
        tokens = np.minimum(self.median_tokens * np.exp(SIGMA * normal), self.max_tokens)
        return np.ceil(tokens).astype(np.int64)

    def seconds(self, seeds: Sequence[int]) -> np.ndarray:
        """Seconds of each rollout of a group."""
        return self.tokens(seeds) * self.seconds_per_token

    def mean_tokens(self) -> float:
        """Mean tokens of a rollout."""
        return float(self.tokens(range(200_000)).mean())

    def longest_seconds(self) -> float:
        """Seconds of a rollout that runs into the limit, as some of every step do."""
        return self.max_tokens * self.seconds_per_token


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
        (task,) = self._dispatch.end(replica, [ticket])
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
            self._script.ends = [(max(self._script.now, end) + seconds, *others) for end, *others in self._script.ends]

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
        status: Status = "ok"
        reports = RolloutReports(
            prompt_id=task.prompt.id,
            num_tokens=tuple(length + 1 for length in lengths),
            num_sampled=lengths,
            num_turns=(1,) * count,
            spans=tuple(((self._version, length),) for length in lengths),
            rewards=({"reward": 1.0},) * count,
            stop_reason=(stop_reason,) * count,
            status=(status,) * count,
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
        """Seconds below which no schedule can bring a step above staleness 0.

        Args:
            generation: seconds of a step's rollouts at full occupancy.
        """
        training, longest = self.train_seconds, engines.longest_seconds()
        if self.takes_turns:
            return training + max(generation, longest / (self.staleness + 1))
        if not self.in_flight:
            return max(training, generation, longest)
        wait = max(0.0, longest - self.staleness * training) / (self.staleness + 1)
        return max(training + wait, generation)


def steps_of(
    chosen: argparse.Namespace, script: Script, pool: ScriptedPool, setting: Setting
) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Simulate a run; yields the number of each step at its end, and what the source measured of it."""
    prompts = [Prompt(f"p{index}", (), np.zeros(1, np.int32), "scripted") for index in range(4 * chosen.prompts)]
    source = PacedRolloutSource(
        pool,
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


def run(chosen: argparse.Namespace, engines: Engines, setting: Setting) -> Measured:
    """Measure a run of a setting."""
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


def run_changing(chosen: argparse.Namespace, engines: Engines, setting: Setting) -> str:
    """Return the table of one run whose replicas change after a third of its steps and after two."""
    script = Script()
    pool = ScriptedPool(script, replace(engines, replicas=chosen.changing[0]), in_flight=setting.in_flight)
    third = max(2, chosen.steps // 3)
    chosen = argparse.Namespace(**vars(chosen) | {"steps": third * len(chosen.changing)})
    changes = {third * index: count for index, count in enumerate(chosen.changing) if index}
    rows, ends, begun_again = [], [0.0], 0
    for step, _ in steps_of(chosen, script, pool, setting):
        ends.append(script.now)
        if step % third == 0:
            # the step in which replicas change does not count
            seconds = (ends[-1] - ends[-third]) / (third - 1)
            per_minute = 60 * chosen.prompts * chosen.group / seconds
            lost = (pool.num_lost - begun_again) * chosen.group
            rows.append((str(pool.num_replicas), f"{seconds:.0f}", f"{per_minute:.0f}", str(lost)))
            begun_again = pool.num_lost
        if step in changes:
            pool.resize(changes[step])
    return table(["replicas", "step, s", "rollouts per minute", "rollouts begun again"], rows)


def main() -> None:
    """Simulate every setting and print the table."""
    chosen = arguments().parse_args()
    if chosen.quick:
        chosen.replicas, chosen.prompts, chosen.steps, chosen.changing = 8, 16, 4, [2, 1, 2]
    engines = Engines(chosen.replicas, chosen.slots, chosen.tokens, chosen.max_tokens, chosen.token_seconds, 2.0)
    rollouts = chosen.prompts * chosen.group
    mean_seconds = engines.mean_tokens() * engines.seconds_per_token
    generation = rollouts * mean_seconds / (chosen.replicas * chosen.slots)
    described = (
        f"{chosen.prompts} prompts of {chosen.group} rollouts a step, {chosen.replicas} replicas of {chosen.slots} "
        f"slots, {chosen.steps} steps; the longest rollout takes {engines.longest_seconds():.0f} s, generation at full "
        f"occupancy {generation:.0f} s."
    )
    sys.stdout.write(f"{surroundings('rl-algos')}\n\n{described}\n")
    for train_seconds in chosen.train_seconds:
        sync = run(chosen, engines, Setting(train_seconds, 0))
        rows = [("synchronous", f"{sync.step_seconds:.0f}", "1.00", "", "", *_shared_cells(sync))]
        for in_flight in (False, True):
            for staleness in chosen.staleness:
                setting = Setting(train_seconds, staleness, in_flight)
                found, bound = run(chosen, engines, setting), setting.bound(engines, generation)
                ratios = (sync.step_seconds / found.step_seconds, sync.step_seconds / bound)
                cells = (f"{found.step_seconds:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
                rows.append((setting.name, *cells, f"{ratios[0] / ratios[1]:.0%}", *_shared_cells(found)))
        sys.stdout.write(f"\nTraining takes {train_seconds:g} s:\n\n{table(HEAD, rows)}\n")

    train_seconds = chosen.train_seconds[0]
    settings = [
        Setting(train_seconds, staleness, in_flight=True, ratio=ratio, takes_turns=True, sampler="ready_first")
        for staleness in chosen.staleness
        for ratio in chosen.over_sampling
        if ratio <= staleness + 1
    ]
    sys.stdout.write(f"\nOver-sampling, generation and training ({train_seconds:g} s) take turns:\n\n")
    sys.stdout.write(f"{biases(chosen, engines, settings, generation)}\n")
    train_seconds, staleness = chosen.sampler_train_seconds, chosen.staleness[-1]
    settings = [Setting(train_seconds, staleness, in_flight=True, sampler=each) for each in get_args(Sampler)]
    sys.stdout.write(f"\nSamplers, training {train_seconds:g} s, staleness {staleness}, in flight:\n\n")
    sys.stdout.write(f"{biases(chosen, engines, settings, generation)}\n")

    changing = Setting(chosen.train_seconds[0], 1, in_flight=True)
    title = f"Replicas that go and join, training {changing.train_seconds:g} s, {changing.name}:"
    sys.stdout.write(f"\n{title}\n\n{run_changing(chosen, engines, changing)}\n")


def biases(chosen: argparse.Namespace, engines: Engines, settings: Sequence[Setting], generation: float) -> str:
    """Return the table of settings with equal trainings next to the synchronous run, with the bias of lengths.

    Args:
        generation: Seconds of a step's rollouts at full occupancy.
    """
    sync, mean = run(chosen, engines, Setting(settings[0].train_seconds, 0)), engines.mean_tokens()
    rows = [("synchronous", f"{sync.step_seconds:.0f}", "1.00", "", *_bias_cells(sync, mean))]
    for setting in settings:
        found, bound = run(chosen, engines, setting), setting.bound(engines, generation)
        ratios = (sync.step_seconds / found.step_seconds, sync.step_seconds / bound)
        name = setting.name if setting.takes_turns else setting.sampler
        cells = (f"{found.step_seconds:.0f}", *(f"{ratio:.2f}" for ratio in ratios))
        rows.append((name, *cells, *_bias_cells(found, mean)))
    return table(BIAS_HEAD, rows)


def _bias_cells(found: Measured, mean: float) -> tuple[str, ...]:
    carried = "" if math.isnan(found.carried_length) else f"{found.carried_length:.2f}"
    lengths = (f"{length / mean:.2f}" for length in (found.first_length, found.later_length))
    return (*lengths, f"{found.carried_share:.0%}", carried)


BIAS_HEAD = (
    "",
    "step, s",
    "speed-up",
    "bound",
    "length, step 1",
    "length, later",
    "carried",
    "carried, length over others",
)

HEAD = (
    "",
    "step, s",
    "speed-up",
    "bound",
    "share of it",
    "trainer idle",
    "most rollouts under way",
    "driver CPU, s per 1,000",
)


def _shared_cells(found: Measured) -> tuple[str, ...]:
    return f"{found.idle:.0%}", str(found.most_under_way), f"{found.cpu_seconds:.3f}"


def arguments() -> argparse.ArgumentParser:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=512)
    parser.add_argument("--slots", type=int, default=32, help="rollouts that a replica decodes at a time")
    parser.add_argument("--prompts", type=int, default=512, help="prompts of a step")
    parser.add_argument("--group", type=int, default=16, help="rollouts of a prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=1000, help="median tokens of a rollout")
    parser.add_argument("--max-tokens", type=int, default=16384, help="most tokens of a rollout")
    parser.add_argument("--token-seconds", type=float, default=0.02, help="seconds of a token")
    parser.add_argument(
        "--train-seconds", type=float, nargs="+", default=[200.0, 265.0, 330.0], help="of a step (200 265 330)"
    )
    parser.add_argument("--over-sampling", type=float, nargs="+", default=[1.25, 1.5, 2.0])
    parser.add_argument("--sampler-train-seconds", type=float, default=50.0, help="of the table of samplers")
    parser.add_argument("--changing", type=int, nargs=3, default=[24, 12, 24], help="replicas of the last table")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    return parser


if __name__ == "__main__":
    main()
