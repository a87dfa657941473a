"""Accuracy on held-out sums after each stage of `rl quickstart`, over seeds and kinds of rounding.

    python benchmarks/quickstart.py [--only KIND ...] [--seeds 42 1 2 3 4 5 6 7 8 9]

The quickstart itself has one seed, so what differs from processor to processor is the rounding, which learning
amplifies. A seed here is that of the model's weights, of the order of the data and of sampling; 42 is the quickstart.
Runs are kept in `--folder`: a finished one is not made again. Nothing else should run on the machine's other cores if
the times are of interest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from measurement import surroundings, table

from rl_algos.tiny_model import make_tiny_model
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.commands.quickstart import GRPO
from rl_launch.commands.train import train
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.run_session.directory.run_folder import RunFolder, is_run

QUICKSTART_SEED = 42


class Kind(NamedTuple):
    """A kind of rounding: the seeds it is tried with by default, environment variables, and settings of both runs; and
    whether a seed is that of the model's weights, too."""

    seeds: Sequence[int]
    variables: dict[str, str] = {}
    settings: Sequence[str] = ()
    seeds_weights: bool = False


NO_VECTORS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
KINDS = {
    "as it is": Kind((QUICKSTART_SEED, *range(1, 10)), seeds_weights=True),
    "no vector instructions": Kind((QUICKSTART_SEED, 1), NO_VECTORS),
    "half the microbatch": Kind((QUICKSTART_SEED, 1), settings=("policy.train_micro_batch_size=32",)),
    "one rank": Kind((QUICKSTART_SEED,), settings=("cluster.cpu_ranks_per_node=1",)),
    "AVX2, two threads": Kind((QUICKSTART_SEED,), {"ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "2"}),
}


def main() -> None:
    """Make the runs, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows: list[list[str]] = []
    increases: list[float] = []
    for name in given.only:
        kind = KINDS[name]
        seeds = given.seeds or kind.seeds
        if given.here:
            _make(given.folder / name.replace(" ", "-"), seeds, kind)
            return
        arguments = ["--here", "--only", name, "--folder", str(given.folder), "--seeds", *map(str, seeds)]
        subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, **kind.variables}, check=True)
        for seed in seeds:
            steps, accuracies = _measured(given.folder / name.replace(" ", "-") / str(seed))
            increases.append(accuracies[-1] - accuracies[0])
            rows.append([name, str(seed), str(steps), *(f"{each:.3f}" for each in (*accuracies, increases[-1]))])
    print(surroundings(), "\n", sep="")
    print(
        table(["rounding", "seed", "steps of SFT", "after SFT", "after 8 steps of GRPO", "16", "24", "increase"], rows)
    )
    mean = sum(increases) / len(increases)
    print(f"\n{len(increases)} runs; the smallest increase is {min(increases):.3f}, the mean {mean:.3f}")


def _make(folder: Path, seeds: Sequence[int], kind: Kind) -> None:
    plan = read_plan("grpo-arithmetic", kind.settings)
    measured = ("grpo.val_at_start=true", "grpo.val_at_end=true", "grpo.val_period=8")
    with VirtualCluster.of(plan.config.cluster, plan.device):
        for seed in seeds:
            place = folder / str(seed)
            is_new = kind.seeds_weights and seed != QUICKSTART_SEED
            make_tiny_model(place / "model", seed=seed if is_new else 0)
            given = [f"policy.model_name={place / 'model'}", f"sft.seed={seed}"]
            _train("sft-arithmetic", place / "sft", [*given, *kind.settings])
            given = [f"policy.model_name={newest_checkpoint(place / 'sft') / 'hf'}", f"grpo.seed={seed}"]
            _train("grpo-arithmetic", place / "grpo", [*given, *GRPO, *measured, *kind.settings])


def _train(recipe: str, folder: Path, settings: Sequence[str]) -> None:
    if not (is_run(folder) and RunFolder(folder).state().status == "finished"):
        train(read_plan(recipe, [*settings, f"run_dir={folder}"]), run_dir=folder, title=recipe).exit_if_stopped()


def _measured(place: Path) -> tuple[int, list[float]]:
    """Return the number of steps of SFT, and the accuracies of a run of GRPO from before its first step."""
    steps = int(RunFolder(place / "sft").last_metrics()["step"])
    lines = [json.loads(line) for line in (place / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return steps, [line["val/accuracy"] for line in lines if "val/accuracy" in line]


if __name__ == "__main__":
    main()
