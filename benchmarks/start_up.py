"""Seconds from `rl train RECIPE` to its first trained step, with everything cached, by part.

    python benchmarks/start_up.py [RECIPE ...]

Each recipe runs once uncounted, which makes its model and the workers' environments if need be, then several times for
one step. The parts are read from the run directory: its config, and the log of the driver.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from measurement import median, rl_command, run_logged, seconds, surroundings, table

RECIPES = ("sft-arithmetic", "grpo-arithmetic")
AIM_S = 60

_STARTED = re.compile(r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ \S+: starting: (?P<seconds>[\d.]+) s")

PARTS = {
    "driver, environments, checks": "imports, config, data, and the backends' own checks, to an open run directory",
    "Ray": "its processes, and a run's requests to the cluster",
    "workers and engines": "processes, models, engines, environments; in the log as `starting`",
    "first weight sync, first step": "until the step is in metrics.jsonl",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE", help=" ".join(RECIPES))
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="test run: one run of sft-arithmetic")
    chosen = parser.parse_args()
    recipes, repeats = (("sft-arithmetic",), 1) if chosen.quick else (chosen.recipes, chosen.repeats)
    print(f"{surroundings('rl-launch', 'ray')}; medians of {repeats}\n")
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        columns = []
        for recipe in recipes:
            runs = [start_up(recipe, Path(scratch) / f"{recipe}-{index}") for index in range(repeats + 1)]
            columns.append([median(parts) for parts in zip(*runs[1:], strict=True)])
    rows = [(name, *(seconds(column[index]) for column in columns)) for index, name in enumerate(PARTS)]
    rows.append((f"to the first trained step (aim: under {AIM_S})", *(seconds(sum(column)) for column in columns)))
    print(table(["s", *recipes], rows))
    print()
    for name, meaning in PARTS.items():
        print(f"- {name}: {meaning}")


def start_up(recipe: str, run_dir: Path) -> list[float]:
    """Seconds of each part of one run."""
    overrides = [f"{recipe.partition('-')[0]}.max_num_steps=1", "checkpointing.enabled=false", f"run_dir={run_dir}"]
    started = time.time()
    run_logged(rl_command("train", recipe, *overrides), run_dir.with_suffix(".log"))
    workers_up, starting_s = workers_started((run_dir / "logs" / "driver.log").read_text().splitlines())
    marks = [
        started,
        (run_dir / "config.yaml").stat().st_mtime,
        workers_up - starting_s,
        workers_up,
        (run_dir / "metrics.jsonl").stat().st_mtime,
    ]
    return [after - before for before, after in itertools.pairwise(marks)]


def workers_started(lines: Sequence[str]) -> tuple[float, float]:
    """When all workers had started, in seconds since the epoch, and how long they took."""
    for line in lines:
        match = _STARTED.match(line)
        if match is not None:
            return datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp(), float(match["seconds"])
    sys.exit(f"driver.log does not say when workers started; it says {lines[-3:]}")


if __name__ == "__main__":
    main()
