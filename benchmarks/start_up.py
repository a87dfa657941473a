"""Seconds from `rl train RECIPE` to its first trained step, by part, and processor seconds by process.

    python benchmarks/start_up.py [RECIPE ...] [--checkout FOLDER]

Worker environments and models are cached: each recipe runs once uncounted. Three starts are compared, in turns: without
a fork server (or as the packages of another checkout start), the first run of the day, which starts its fork servers,
and a run after another one. The parts are read from the run directory: its config, and the log of the driver.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from measurement import rl_command, seconds, surroundings, table
from processor_time import KINDS, processor_seconds

RECIPES = ("sft-arithmetic", "grpo-arithmetic")

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
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each (%(default)s)")
    parser.add_argument("--checkout", type=Path, help="compare with this checkout, in its .venv")
    parser.add_argument("--quick", action="store_true", help="test run: one run of sft-arithmetic")
    chosen = parser.parse_args()
    recipes, repeats = (("sft-arithmetic",), 1) if chosen.quick else (chosen.recipes, chosen.repeats)
    print(f"{surroundings('rl-launch', 'ray')}; medians of {repeats}")
    with tempfile.TemporaryDirectory(prefix="rl-", dir="/tmp") as scratch:
        for recipe in recipes:
            print(f"\n## {recipe}\n")
            runs = compared(recipe, Path(scratch), chosen.checkout, repeats)
            print(comparison("s", list(PARTS), {name: [parts for parts, _ in each] for name, each in runs.items()}))
            print()
            kinds = list(dict.fromkeys(KINDS.values()))
            spent = {name: [[cpu.get(kind, 0.0) for kind in kinds] for _, cpu in each] for name, each in runs.items()}
            print(comparison("processor seconds", kinds, spent))
    print()
    for name, meaning in PARTS.items():
        print(f"- {name}: {meaning}")


Measured = tuple[list[float], dict[str, float]]


def compared(recipe: str, scratch: Path, checkout: Path | None, repeats: int) -> dict[str, list[Measured]]:
    """Return the seconds by part and the processor seconds by process of each run, by the kind of start."""
    after = scratch / "after"
    after.mkdir(exist_ok=True)
    other = "other checkout" if checkout else "no fork server"
    runs: dict[str, list[Measured]] = {other: [], "first run": [], "after a run": []}
    for index in range(repeats + 1):
        for name, found in runs.items():
            folder = Path(tempfile.mkdtemp(dir=scratch))
            environ = {"TMPDIR": str(after if name == "after a run" else folder)}
            python, overrides = Path(sys.executable), []
            if name == other and checkout is not None:
                python = checkout.absolute() / ".venv" / "bin" / "python"
            elif name == other:
                overrides = ["cluster.fork_server_s=0"]
            measured = start_up(python, recipe, folder / "run", overrides, environ)
            if index:
                found.append(measured)
            # servers end when their sockets are gone
            shutil.rmtree(folder)
    shutil.rmtree(after)
    return runs


def comparison(unit: str, names: Sequence[str], runs: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return a table of the medians of rows of numbers, with their sums and the ratio of these to the first
    column's."""
    columns = [[median(values) for values in zip(*each, strict=True)] for each in runs.values()]
    sums = [median(sum(values) for values in each) for each in runs.values()]
    rows = [(name, *(seconds(column[index]) for column in columns)) for index, name in enumerate(names)]
    rows.append(("**all**", *map(seconds, sums)))
    rows.append(("ratio", *(f"{each / sums[0]:.2f}" for each in sums)))
    return table([unit, *runs], rows)


def start_up(
    python: Path, recipe: str, run_dir: Path, overrides: Sequence[str], environ: Mapping[str, str]
) -> Measured:
    """Return the seconds of each part of one run, and its processor seconds by kind of process."""
    settings = [f"{recipe.partition('-')[0]}.max_num_steps=1", "checkpointing.enabled=false", f"run_dir={run_dir}"]
    started = time.time()
    command = rl_command("train", recipe, *settings, *overrides, python=python)
    spent = processor_seconds(command, run_dir.with_suffix(".log"), environ)
    workers_up, starting_s = workers_started((run_dir / "logs" / "driver.log").read_text().splitlines())
    marks = [
        started,
        (run_dir / "config.yaml").stat().st_mtime,
        workers_up - starting_s,
        workers_up,
        (run_dir / "metrics.jsonl").stat().st_mtime,
    ]
    return [after - before for before, after in itertools.pairwise(marks)], spent


def workers_started(lines: Sequence[str]) -> tuple[float, float]:
    """Return the seconds since the epoch when all workers had started, and how long they took."""
    for line in lines:
        match = _STARTED.match(line)
        if match is not None:
            return datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp(), float(match["seconds"])
    sys.exit(f"driver.log does not say when workers started; it says {lines[-3:]}")


if __name__ == "__main__":
    main()
