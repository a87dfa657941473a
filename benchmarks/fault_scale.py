"""Goodput of an asynchronous run on 1,000 GPUs with failures by rate, in simulated time.

    python benchmarks/fault_scale.py [--hours 2000]

Half of the GPUs are 512 replicas of one GPU with heavy-tailed lengths, and 488 train. A step takes what the simulation
of `async_scale.py` finds for these replicas, staleness 4 and trainings of 265 seconds. A failure of a training GPU ends
the step, and training resumes from the last checkpoint after a restart. A failure of a replica is repaired while the
others generate.
"""

from __future__ import annotations

import argparse
import sys

from measurement import surroundings, table

from rl_launch.planning.simulation import Engines, Faults, Setting, SimulatedSteps, best_save_seconds, goodput, simulate

REPLICAS, TRAINERS = 512, 488
TRAIN_SECONDS = 265.0
RESTART_SECONDS, REPLICA_SECONDS = 600.0, 300.0
HOURS_BETWEEN = (50_000, 10_000, 2_000)
"""Mean hours between failures of a GPU. A run of 54 days on 16,384 H100s had 419 unexpected interruptions, one in
50,000 hours of a GPU (https://arxiv.org/abs/2407.21783, section 3.3.4)."""
SAVE_SECONDS = (10.0, 120.0)
"""Seconds for which a save holds up training: copies to host memory, or a whole write."""
PERIODS = (1, 2, 5, 10, 25, 50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2000.0, help="simulated hours of each case")
    parser.add_argument("--quick", action="store_true", help="see that it runs")
    chosen = parser.parse_args()
    replicas, hours = (8, 20.0) if chosen.quick else (REPLICAS, chosen.hours)
    engines = Engines(replicas, 32, 1000, 16384, 0.02, 2.0)
    steps = SimulatedSteps(16 if chosen.quick else 512, 16, 4 if chosen.quick else 12)
    step = simulate(steps, engines, Setting(TRAIN_SECONDS, 4, in_flight=True)).step_seconds
    sys.stdout.write(f"{surroundings('rl-launch')}\n\nA step takes {step:.0f} s without failures.\n\n")
    rows = []
    for between in HOURS_BETWEEN:
        faults = Faults(TRAINERS, REPLICAS, between, RESTART_SECONDS, REPLICA_SECONDS)
        for save in SAVE_SECONDS:
            best = best_save_seconds(save, faults) / step
            found = [goodput(step, save, period, faults, hours=hours) for period in PERIODS]
            lost = found[PERIODS.index(10)].lost_by_fault / 60
            shares = [f"{each.goodput:.1%}" for each in found]
            faults_a_day = found[0].num_faults / hours * 24
            rows.append((f"{between:,}", f"{faults_a_day:.1f}", f"{save:.0f}", *shares, f"{best:.1f}", f"{lost:.0f}"))
    head = (
        "hours between failures of a GPU",
        "of the trainer a day",
        "save, s",
        *(f"every {period}" for period in PERIODS),
        "best period by formula",
        "lost per failure, min, every 10",
    )
    sys.stdout.write(f"{table(head, rows)}\n")


if __name__ == "__main__":
    main()
