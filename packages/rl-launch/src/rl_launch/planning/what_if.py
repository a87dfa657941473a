"""What-if: steps of a run with other replicas, staleness or devices, simulated from its own lengths and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rl_core.errors import ConfigError
from rl_launch.placement.topology import GENERATION
from rl_launch.planning.learned import measured_seconds
from rl_launch.planning.plan import GENERATING, Plan
from rl_launch.planning.simulation import Engines, Measured, Setting, SimulatedSteps, simulate
from rl_launch.run_session.directory.run_folder import RunFolder

STEPS = 20
"""Simulated steps of each case."""
STALENESS = (1, 2, 4)
UPDATE_SECONDS = 1.0
"""Seconds of a weight update in flight if a run does not say."""


@dataclass(frozen=True)
class RunFacts:
    """What a simulation takes from a run or a plan.

    Args:
        lengths: Sampled tokens of rollouts.
        steps: Prompts and rollouts of a step.
        train_seconds: Seconds of a step without its generation and weight sync.
        update_seconds: Seconds of a weight sync.
        generation_seconds: Seconds of generation if nothing overlaps it.
        replicas: Replicas.
        slots: Rollouts that a replica decodes at a time.
        is_shared: True if generation and training take turns on their devices.
    """

    lengths: tuple[int, ...]
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
        rows = run.metrics()
        lengths: list[int] = []
        for step in run.rollout_steps():
            lengths += [int(row["num_sampled"]) for row in run.rollouts(step) if row.get("num_sampled")]
        if not lengths:
            raise ConfigError(f"{run.path} has no rollouts to simulate from")
        seconds = measured_seconds(rows)
        generation, sync = seconds.get(GENERATING, 0.0), seconds.get("weight_sync", UPDATE_SECONDS)
        training = max(0.0, seconds.get("step", 0.0) - generation - sync)
        return cls._of(plan, tuple(lengths), training, sync, generation)

    @classmethod
    def of_plan(cls, plan: Plan, lengths: Sequence[int] = ()) -> RunFacts:
        """Take times from a plan, and lengths that are log-normal around its mean if none are given."""
        generation = plan.seconds.get(GENERATING, 0.0)
        sync = plan.seconds.get("weight_sync", UPDATE_SECONDS)
        return cls._of(plan, tuple(lengths), sum(plan.seconds.values()) - generation - sync, sync, generation)

    @classmethod
    def _of(cls, plan: Plan, lengths: tuple[int, ...], training: float, sync: float, generation: float) -> RunFacts:
        work, engine = plan.work, plan.engine
        slots = 1
        if engine is not None:
            cache = next(usage.device.get("KV cache", 0.0) for usage in plan.usages if usage.role == GENERATION)
            slots = max(1, round(engine.slots(cache, work.row))) * engine.layout.engines
        steps = SimulatedSteps(max(1, work.num_rows // work.group), work.group, STEPS)
        is_shared = GENERATION in plan.topology.sharing
        return cls(lengths, steps, training, sync, generation, plan.topology.num_replicas, slots, is_shared)

    def engines(self) -> Engines:
        """Return scripted engines whose synchronous steps generate for as long as those of the run."""
        mean = sum(self.lengths) / len(self.lengths) if self.lengths else 1000.0
        longest = max(self.lengths, default=16 * round(mean))
        slow = Engines(self.replicas, self.slots, round(mean), longest, 1.0, self.update_seconds, self.lengths)
        synchronous = simulate(replace(self.steps, steps=6), slow, Setting(0.0, 0))
        each = self.generation_seconds / synchronous.step_seconds if synchronous.step_seconds else 0.0
        return replace(slow, seconds_per_token=each)


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
    if facts.is_shared:
        # Half of the devices train, so that training takes twice as long on them.
        half = replace(engines, replicas=max(1, facts.replicas // 2))
        for staleness in STALENESS:
            yield case(f"half of the devices apart, staleness {staleness}", half, 2 * facts.train_seconds, staleness)
    else:
        for staleness in STALENESS:
            yield case(f"staleness {staleness}", engines, facts.train_seconds, staleness)
    for name, count in (("half the replicas", facts.replicas // 2), ("twice the replicas", 2 * facts.replicas)):
        if count:
            yield case(f"{name}, staleness 1", replace(engines, replicas=count), facts.train_seconds, 1)
    longer = tuple(2 * length for length in facts.lengths)
    doubled = replace(
        engines, lengths=longer, median_tokens=2 * engines.median_tokens, max_tokens=2 * engines.max_tokens
    )
    yield case("completions twice as long, synchronous", doubled, 2 * train, 0)
    yield case("completions twice as long, staleness 1", doubled, 2 * facts.train_seconds, 1)
    fewer = replace(engines, replicas=max(1, facts.replicas // 2))
    yield case("half of all devices, synchronous", fewer, 2 * train, 0)


def lines(facts: RunFacts) -> Iterator[str]:
    """Yield the cases as lines of text."""
    yield ""
    longest = max(facts.lengths, default=0)
    known = f"{len(facts.lengths):,} rollouts of up to {longest:,} tokens" if facts.lengths else "assumed lengths"
    yield f"Simulated from {known}, {facts.replicas} replicas of {facts.slots} slots:"
    yield f"  {'':<44} {'step':>8} {'trainer idle':>13}"
    for case in cases(facts):
        yield f"  {case.name:<44} {case.found.step_seconds:>7.3g}s {case.found.idle:>12.0%}"
