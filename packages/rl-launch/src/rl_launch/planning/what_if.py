"""What-if: steps of a run with other replicas, staleness or devices, simulated from its own lengths and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Any, NamedTuple

import numpy as np

from rl_core.errors import ConfigError
from rl_launch.placement.topology import GENERATION
from rl_launch.planning.learned import AHEAD, measured_seconds
from rl_launch.planning.plan import GENERATING, Plan
from rl_launch.planning.seconds import REQUEST_SECONDS
from rl_launch.planning.simulation import SIGMA, Engines, Measured, Setting, SimulatedSteps, simulate
from rl_launch.planning.text import counted
from rl_launch.run_session.directory.run_folder import RunFolder

STEPS = 20
"""Simulated steps of each case."""
STALENESS = (1, 2, 4)
IDLE = "idle/generators"
"""Metric of runs that generate while they train: the share of the replicas' time without rollouts."""
UPDATE_SECONDS = 1.0
"""Seconds of a weight update in flight if a run does not say."""


def sampled_tokens(run: RunFolder) -> tuple[int, ...]:
    """Return the sampled tokens of each rollout of a run.

    Raises:
        ConfigError: If it has no rollouts.
    """
    rows = (row for step in run.rollout_steps() for row in run.rollouts(step))
    lengths = tuple(int(row["num_sampled"]) for row in rows if row.get("num_sampled"))
    if not lengths:
        raise ConfigError(f"{run.path} has no rollouts to simulate from")
    return lengths


def log_normal(mean: float, longest: int, count: int = 1000) -> tuple[int, ...]:
    """Return lengths at equal steps of probability, with this mean, log-normal but for a maximum.

    Args:
        mean: Their mean, below `longest`.
        longest: Their maximum.
        count: Number of lengths.
    """
    normal = np.array([NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)])
    widths = np.exp(SIGMA * normal)
    middle = mean / widths.mean()
    for _ in range(50):
        middle *= mean / np.minimum(middle * widths, longest).mean()
    return tuple(np.maximum(1, np.minimum(middle * widths, longest).round()).astype(int).tolist())


@dataclass(frozen=True)
class RunFacts:
    """What a simulation takes from a run or a plan.

    Args:
        lengths: Sampled tokens of rollouts.
        steps: Prompts and rollouts of a step.
        prompt: Mean tokens of a prompt.
        train_seconds: Seconds of a step without its generation and weight sync.
        update_seconds: Seconds of a weight sync.
        generation_seconds: Seconds of generation if nothing overlaps it.
        replicas: Replicas.
        slots: Rollouts that a replica decodes at a time.
        is_shared: True if generation and training take turns on their devices.
    """

    lengths: tuple[int, ...]
    prompt: float
    steps: SimulatedSteps
    train_seconds: float
    update_seconds: float
    generation_seconds: float
    replicas: int
    slots: int
    is_shared: bool

    @classmethod
    def of_run(cls, run: RunFolder, plan: Plan) -> RunFacts:
        """Read a finished run.

        Args:
            run: The run; rollouts must have been written.
            plan: Its plan.

        Raises:
            ConfigError: If it has no rollouts.
        """
        rows, lengths = run.metrics(), sampled_tokens(run)
        seconds = measured_seconds(rows)
        step, generation = seconds.get("step", 0.0), seconds.get(GENERATING, 0.0)
        sync = seconds.get("weight_sync", UPDATE_SECONDS)
        training = max(0.0, step - generation - sync)
        if idle := [row[IDLE] for row in rows if row.get(IDLE) is not None and AHEAD in row]:
            # What such a run records as generation is how long training waited.
            generation = (1 - median(idle)) * step
        return cls._of(plan, lengths, training, sync, generation)

    @classmethod
    def of_plan(cls, plan: Plan, lengths: Sequence[int] = ()) -> RunFacts:
        """Take times from a plan.

        Args:
            plan: The plan.
            lengths: Sampled tokens of rollouts; empty for log-normal ones with the mean and the maximum of the plan.
        """
        generation = plan.seconds.get(GENERATING, 0.0)
        sync = plan.seconds.get("weight_sync", UPDATE_SECONDS)
        lengths = tuple(lengths) or log_normal(plan.work.completion, plan.work.longest)
        return cls._of(plan, lengths, sum(plan.seconds.values()) - generation - sync, sync, generation)

    @classmethod
    def _of(cls, plan: Plan, lengths: tuple[int, ...], training: float, sync: float, generation: float) -> RunFacts:
        work, engine = plan.work, plan.engine
        slots = 1
        if engine is not None:
            cache = next(usage.device.get("KV cache", 0.0) for usage in plan.usages if usage.role == GENERATION)
            slots = max(1, round(engine.slots(cache, work.row))) * engine.layout.engines
        steps = SimulatedSteps(max(1, work.num_rows // work.group), work.group, STEPS)
        is_shared = GENERATION in plan.topology.sharing
        return cls(
            lengths, work.prompt, steps, training, sync, generation, plan.topology.num_replicas, slots, is_shared
        )

    @property
    def completion(self) -> float:
        """Mean tokens of a completion."""
        return sum(self.lengths) / len(self.lengths)

    def engines(self) -> Engines:
        """Return scripted engines whose synchronous steps generate for as long as those of the run."""
        middle, longest = round(self.completion), max(self.lengths)
        slow = Engines(self.replicas, self.slots, middle, longest, 1.0, self.update_seconds, self.lengths)
        synchronous = simulate(replace(self.steps, steps=6), slow, Setting(0.0, 0))
        # The host begins one rollout after another, as many as are decoded at a time.
        count = self.steps.prompts * self.steps.group / self.replicas
        begun = min(count * REQUEST_SECONDS, self.generation_seconds / 2)
        each = (self.generation_seconds - begun) / synchronous.step_seconds if synchronous.step_seconds else 0.0
        return replace(slow, seconds_per_token=each, seconds_per_rollout=begun * min(1.0, self.slots / count))


@dataclass(frozen=True)
class Case:
    """A simulated case.

    Args:
        name: What differs from the run, in words.
        found: What was measured.
    """

    name: str
    found: Measured


def cases(facts: RunFacts) -> Iterator[Case]:
    """Yield the run as it is, and with other replicas, staleness, lengths and devices."""
    engines, train = facts.engines(), facts.train_seconds + facts.update_seconds

    def case(name: str, own: Engines, seconds: float, staleness: int) -> Case:
        return Case(name, simulate(facts.steps, own, Setting(seconds, staleness, in_flight=True)))

    yield case("synchronous", engines, train, 0)
    # Half of the devices generate, and the others train: each takes twice as long on them.
    few = max(1, facts.replicas // 2)
    half = replace(engines, replicas=few, seconds_per_token=engines.seconds_per_token * 2 * few / facts.replicas)
    if facts.is_shared:
        for staleness in STALENESS:
            yield case(f"half of the devices apart, staleness {staleness}", half, 2 * facts.train_seconds, staleness)
    else:
        for staleness in STALENESS:
            yield case(f"staleness {staleness}", engines, facts.train_seconds, staleness)
    for factor, few_or_many in ((0.5, "half"), (2, "twice")):
        count = int(factor * facts.replicas)
        name = f"{few_or_many} the replicas{' on further devices' if facts.is_shared else ''}, staleness 1"
        if count:
            yield case(name, replace(engines, replicas=count), facts.train_seconds, 1)
    doubled = replace(engines, lengths=tuple(2 * length for length in facts.lengths))
    more = (facts.prompt + 2 * facts.completion) / (facts.prompt + facts.completion)
    longer = more * facts.train_seconds
    yield case("completions twice as long, synchronous", doubled, longer + facts.update_seconds, 0)
    yield case("completions twice as long, staleness 1", doubled, longer, 1)
    yield case("half of all devices, synchronous", half, 2 * facts.train_seconds + facts.update_seconds, 0)


class Simulation(NamedTuple):
    """What a run would take in other circumstances.

    Args:
        source: Where lengths and times come from, in words.
        problem: Why nothing was simulated, as a sentence without a full stop; empty if it was.
        cases: The run as it is, and with what differs.
    """

    source: str = ""
    problem: str = ""
    cases: Sequence[Case] = ()

    def lines(self) -> Iterator[str]:
        """Yield it as lines of text."""
        yield ""
        if self.problem:
            yield f"Not simulated: {self.problem}."
            return
        yield f"Simulated from {self.source}:"
        yield f"  {'':<44} {'step':>8} {'trainer idle':>13}"
        for case in self.cases:
            yield f"  {case.name:<44} {case.found.step_seconds:>7.3g}s {case.found.idle:>12.0%}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        found = [
            {"name": each.name, "step_seconds": each.found.step_seconds, "idle": each.found.idle} for each in self.cases
        ]
        return {"source": self.source, "problem": self.problem, "cases": found}


def simulated(plan: Plan, run: RunFolder | None, *, has_times: bool) -> Simulation:
    """Simulate the cases of a plan.

    Args:
        plan: The plan.
        run: Run whose lengths are used; None for log-normal ones.
        has_times: True if the plan is that of the run, whose times are used too.
    """
    if plan.engine is None:
        return Simulation(problem="the run generates nothing on its own devices")
    try:
        lengths = () if run is None else sampled_tokens(run)
    except ConfigError as error:
        return Simulation(problem=str(error))
    if run is not None and has_times:
        facts, source = RunFacts.of_run(run, plan), ""
    else:
        facts, source = RunFacts.of_plan(plan, lengths), "the planned times and "
    source += "log-normal lengths" if run is None else f"{len(lengths):,} rollouts of {run.path}"
    source += f", {counted(facts.replicas, 'replica')} of {counted(facts.slots, 'slot')}"
    return Simulation(source, cases=tuple(cases(facts)))
