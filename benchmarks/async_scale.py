"""Steps of an asynchronous run on 512 replicas, in simulated time, beside the synchronous run and the bound.

    python benchmarks/async_scale.py [--replicas 512] [--train-seconds 200 265 330] [--changing 24 12 24]

The source of rollouts, its ledger and the dispatch of groups to replicas are the product's own. Engines are scripted: a
replica decodes so many rollouts at a time, each at one speed, and queues the others. Lengths are log-normal with a
99th percentile of eight times the median, cut off at the limit of tokens. Training takes a fixed time; between two
calls nobody deals groups to replicas, as in a run. A weight update either lets the rollouts that have begun end
(`drained`), or interrupts them for a moment and continues (`in flight`).

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
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from measurement import surroundings, table

from rl_algos.rollouts.config import Sampler
from rl_launch.planning.simulation import (
    Engines,
    Measured,
    Script,
    ScriptedPool,
    Setting,
    SimulatedSteps,
    simulate,
    steps_of,
)


def steps_in(chosen: argparse.Namespace) -> SimulatedSteps:
    """Return the steps that the command line asks for."""
    return SimulatedSteps(chosen.prompts, chosen.group, chosen.steps)


def run_changing(chosen: argparse.Namespace, engines: Engines, setting: Setting) -> str:
    """Return the table of one run whose replicas change after a third of its steps and after two."""
    script = Script()
    pool = ScriptedPool(script, replace(engines, replicas=chosen.changing[0]), in_flight=setting.in_flight)
    third = max(2, chosen.steps // 3)
    steps = replace(steps_in(chosen), steps=third * len(chosen.changing))
    changes = {third * index: count for index, count in enumerate(chosen.changing) if index}
    rows, ends, begun_again = [], [0.0], 0
    for step, _ in steps_of(steps, script, pool, setting):
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
        sync = simulate(steps_in(chosen), engines, Setting(train_seconds, 0))
        rows = [("synchronous", f"{sync.step_seconds:.0f}", "1.00", "", "", *_shared_cells(sync))]
        for in_flight in (False, True):
            for staleness in chosen.staleness:
                setting = Setting(train_seconds, staleness, in_flight)
                found, bound = simulate(steps_in(chosen), engines, setting), setting.bound(engines, generation)
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
    sync, mean = simulate(steps_in(chosen), engines, Setting(settings[0].train_seconds, 0)), engines.mean_tokens()
    rows = [("synchronous", f"{sync.step_seconds:.0f}", "1.00", "", *_bias_cells(sync, mean))]
    for setting in settings:
        found, bound = simulate(steps_in(chosen), engines, setting), setting.bound(engines, generation)
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
