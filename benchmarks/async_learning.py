"""Learning of the tiny GRPO recipe from rollouts of several ages, next to the synchronous run.

    python benchmarks/async_learning.py [--only NAME ...] [--seeds 1 2 3] [--jobs 2] [--png FILE]

Every run has the same settings except the age: greedy accuracy on held-out sums after 48 steps of four updates, from
one warmed-up model. Generation has a process of its own. A rollout begins as early as the bound allows, so most tokens
are as old as it is. Runs are made, kept and resumed as in `learning.py`.

Two cases at the largest age show what the importance correction is for. The config refuses a loss without one; bounding
every weight from below and above by 1 asks for it. `mismatch/effective_sample_size` and `policy/behavior_ratio` are
there to warn of such a run: the table shows their means over its last half.

In the case with replicas that come and go, one of two is killed every few seconds; another takes its place.

Completions of these sums have three tokens, so an update in flight interrupts few of them. `staleness/several_versions`
is their share; those that wait in the engine's queue begin with the new weights.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
from learning import SEEDS, Case, Curve, finished_runs, make_runs, on_policy
from measurement import surroundings, table

from rl_launch.run_session.directory.run_folder import RunFolder

APART = (
    "cluster.cpu_ranks_per_node=2",  # one for the policy, one for generation
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "grpo.async_grpo.enabled=true",
)
CORRECTED = ("loss_fn.importance.high=2",)
UNCORRECTED = ("loss_fn.importance.high=1", "loss_fn.importance.low=1")
IN_FLIGHT = (
    "grpo.async_grpo.in_flight_weight_updates=true",
    # small batches are slow enough that updates find rollouts under way
    "policy.generation.hf_cfg.max_batch_size=4",
)

REPLICAS = ("policy.generation.min_replicas=1", "policy.generation.max_replicas=2")
KILL_S = (5.0, 15.0)
"""Least and longest time between two kills."""

ACCURACY = "val/accuracy"
WATCHED = (
    "generation/replicas",
    "staleness/mean",
    "staleness/several_versions",
    "policy/behavior_ratio",
    "mismatch/kl",
    "mismatch/effective_sample_size",
)


@contextmanager
def kills(_: Path) -> Iterator[None]:
    """Kill one replica of this process's Ray after another, at random moments."""
    is_over = threading.Event()
    killer = threading.Thread(target=_kill_until, args=(is_over,), daemon=True)
    killer.start()
    try:
        yield
    finally:
        is_over.set()
        killer.join()


def _kill_until(is_over: threading.Event) -> None:
    while not is_over.wait(random.uniform(*KILL_S)):
        with suppress(psutil.NoSuchProcess):
            found = [
                each for each in psutil.Process().children(recursive=True) if "ray::AsyncWorkerHost" in _title(each)
            ]
            if len(found) > 1:
                random.choice(found).kill()


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def at_age(age: int, *settings: str, correction: Sequence[str] = CORRECTED) -> Case:
    """Return GRPO with rollouts of at most this age, in steps."""
    bound = f"grpo.async_grpo.max_trajectory_age_steps={age}"
    return on_policy("grpo-arithmetic", *APART, bound, *correction, *settings)


SYNCHRONOUS = "age 0"
CASES = {
    SYNCHRONOUS: at_age(0),
    "age 1": at_age(1),
    "age 2": at_age(2),
    "age 4": at_age(4),
    "age 2, in flight": at_age(2, *IN_FLIGHT),
    "age 4, in flight": at_age(4, *IN_FLIGHT),
    "age 2, two replicas": at_age(2, *REPLICAS),
    "age 2, killed replicas": replace(at_age(2, *REPLICAS), beside=kills),
    "age 8": at_age(8),
    "age 8, uncorrected": at_age(8, correction=UNCORRECTED),
}

Runs = Mapping[str, Sequence[RunFolder]]


def main() -> None:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=str([*CASES]))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="(1 2 3)")
    parser.add_argument("--folder", type=Path, default=Path("runs/async_learning"), help="of the runs (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves as well; needs matplotlib")
    parser.add_argument("--table", action="store_true", help="start nothing: show the runs that are finished")
    parser.add_argument("--quick", action="store_true", help="see that it runs: four steps of two cases")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    cases = {name: CASES[name] for name in chosen.only}
    if chosen.quick:
        folder, chosen.seeds, short = folder / "quick", SEEDS[:1], ("grpo.max_num_steps=4",)
        cases = {SYNCHRONOUS: at_age(0, *short), "age 2, in flight": at_age(2, *IN_FLIGHT, *short)}
    if not chosen.table:
        by_folder = {name_of_folder(name): case for name, case in cases.items()}
        make_runs(by_folder, chosen.seeds, folder, num_jobs=chosen.jobs)
    runs = {name: finished_runs(folder, name_of_folder(name), chosen.seeds) for name in cases}
    sys.stdout.write(f"{surroundings('rl-launch', 'rl-algos')}\n\n{table(HEAD, rows(runs))}\n")
    if chosen.png is not None:
        draw({name: found for name, found in runs.items() if found}, chosen.png)


def name_of_folder(case: str) -> str:
    return case.replace(", ", "-").replace(" ", "-")


HEAD = ("rollouts", "runs", "accuracy, start", "end", "std over seeds", "beside age 0", "reaches it", *WATCHED)


def rows(runs: Runs) -> list[tuple[str, ...]]:
    """Return the rows of the table. A case reaches the synchronous one if its mean is not lower by more than the noise,
    which is two standard errors of the difference of the means. A single seed leaves it open."""
    ends = {name: [Curve.of(run, ACCURACY).values[-1] for run in found] for name, found in runs.items()}
    made = []
    for name, found in runs.items():
        if not found:
            made.append((name, "0", *[""] * (len(HEAD) - 2)))
            continue
        start = statistics.fmean(Curve.of(run, ACCURACY).values[0] for run in found)
        end = statistics.fmean(ends[name])
        noise = f"{statistics.stdev(ends[name]):.3f}" if len(found) > 1 else ""
        compared = _beside(ends[name], ends.get(SYNCHRONOUS, []))
        watched = [_late_mean(found, metric) for metric in WATCHED]
        made.append((name, str(len(found)), f"{start:.3f}", f"{end:.3f}", noise, *compared, *watched))
    return made


def _beside(ends: Sequence[float], synchronous: Sequence[float]) -> tuple[str, str]:
    if not synchronous or ends is synchronous:
        return "", ""
    difference = statistics.fmean(ends) - statistics.fmean(synchronous)
    if min(len(ends), len(synchronous)) < 2:
        return f"{difference:+.3f}", ""
    variance = statistics.variance(ends) / len(ends) + statistics.variance(synchronous) / len(synchronous)
    return f"{difference:+.3f}", "yes" if difference >= -2 * variance**0.5 else "no"


def _late_mean(runs: Sequence[RunFolder], metric: str) -> str:
    """Return the mean over the last half of the steps of all runs; empty if none has the metric."""
    rows = [row for run in runs for row in run.metrics()]
    last = max((row["step"] for row in rows), default=0)
    values = [row[metric] for row in rows if row.get(metric) is not None and row["step"] > last / 2]
    return f"{statistics.fmean(values):.3g}" if values else ""


def draw(runs: Runs, path: Path) -> None:
    """Draw accuracy and effective sample size by step: a line for the mean over seeds, and a band from the smallest to
    the largest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = (ACCURACY, "mismatch/effective_sample_size", "policy/behavior_ratio")
    figure = Figure(figsize=(4.6 * len(metrics), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for place, metric in enumerate(metrics, start=1):
        axes = figure.add_subplot(1, len(metrics), place)
        for name, found in runs.items():
            curves = [Curve.of(run, metric) for run in found]
            shared = sorted(set.intersection(*(set(curve.steps) for curve in curves)))
            by_step = [[curve.values[curve.steps.index(step)] for curve in curves] for step in shared]
            (line,) = axes.plot(shared, [statistics.fmean(values) for values in by_step], linewidth=1.4, label=name)
            low, high = zip(*((min(values), max(values)) for values in by_step), strict=True)
            axes.fill_between(shared, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set_title(metric, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    sys.stdout.write(f"\n{path}\n")


if __name__ == "__main__":
    main()
