"""Learning of agents that train together: self-play on nim, and a proposer of sums with its solvers, by seed.

    python benchmarks/several_agents.py [--only NAME ...] [--seeds 1 2 3] [--jobs 2]

Every run is the tiny recipe as `rl train` makes it, on the CPU; runs and options are as of `learning.py`. After the
table, each metric is shown along the steps of every run.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from learning import (
    GENERATION,
    HEAD,
    SEEDS,
    Aim,
    Case,
    Curve,
    Measure,
    along,
    ends_above,
    finished_runs,
    make_runs,
    rises_by,
    rows,
)
from measurement import surroundings, table

STAYS = Aim("within 0.5 of 0", lambda start, end: abs(end) < 0.5)
"""Neither player of a game wins all the time."""

VALIDATES = ("grpo.val_at_start=true", "grpo.val_at_end=true")

CASES = {
    "self-play": Case(
        "grpo-self-play-tiny",
        "grpo",
        (
            Measure("val/accuracy", rises_by(0.05)),
            Measure("environment/accuracy", rises_by(0.2)),
            Measure("environment/valid", ends_above(0.95)),
            Measure("agent/first/reward", rises_by(0.2)),
            Measure("agent/second/reward", STAYS),
        ),
        (*GENERATION, *VALIDATES),
        warm_key="",
    ),
    "proposer-solver": Case(
        "grpo-proposer-tiny",
        "grpo",
        (
            Measure("val/accuracy", rises_by(0.1)),
            Measure("agent/proposer/reward", rises_by(0.15)),
            Measure("agent/solver/reward", STAYS),
            Measure("environment/sum", rises_by(0.0)),
        ),
        (*GENERATION, *VALIDATES),
        warm_key="",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=" ".join(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="(1 2 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs/several_agents"), help="of the runs (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    parser.add_argument("--table", action="store_true", help="start nothing: show the runs that are finished")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    cases = {name: CASES[name] for name in chosen.only}
    if not chosen.table:
        make_runs(cases, chosen.seeds, folder, num_jobs=chosen.jobs)
    curves = {
        (name, measure.metric): [Curve.of(run, measure.metric) for run in finished_runs(folder, name, chosen.seeds)]
        for name, case in cases.items()
        for measure in case.measures
    }
    print(f"{surroundings('rl-launch', 'rl-algos', 'rl-envs')}\n")
    print(table(HEAD, rows(cases, curves)))
    print()
    print(table(("game", "metric", "steps", "values of each seed"), along(curves)))


if __name__ == "__main__":
    main()
