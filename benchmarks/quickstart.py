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
from rl_launch.session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.session.directory.run_folder import RunFolder, is_run

QUICKSTART_SEED = 42


class Kind(NamedTuple):
    """A kind of rounding: the seeds it is tried with by default, environment variables, and settings of both runs."""

    seeds: Sequence[int]
    variables: dict[str, str] = {}
    settings: Sequence[str] = ()


KINDS = {
    "as it is": Kind((QUICKSTART_SEED, *range(1, 10))),
    "no vector instructions": Kind(
        (QUICKSTART_SEED, 1), {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    ),
    "half the microbatch": Kind((QUICKSTART_SEED, 1), {}, ("policy.train_micro_batch_size=32",)),
    "one rank": Kind((QUICKSTART_SEED, 1), {}, ("cluster.cpu_ranks_per_node=1",)),
}


def main() -> None:
    """Make the runs, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = []
    for name in given.only:
        seeds, variables, settings = KINDS[name]
        seeds = given.seeds or seeds
        if given.here:
            _make(given.folder / name.replace(" ", "-"), seeds, settings)
            return
        arguments = ["--here", "--only", name, "--folder", str(given.folder), "--seeds", *map(str, seeds)]
        subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, **variables}, check=True)
        rows += [[name, seed, *_measured(given.folder / name.replace(" ", "-") / str(seed))] for seed in seeds]
    print(surroundings(), "\n", sep="")
    print(table(["rounding", "seed", "steps of SFT", "after SFT", "after 8 steps of GRPO", "16", "24", "rise"], rows))
    rises = [row[-1] for row in rows]
    print(f"\n{len(rises)} runs; the smallest rise is {min(rises):.3f}, the mean {sum(rises) / len(rises):.3f}")


def _make(folder: Path, seeds: Sequence[int], settings: Sequence[str]) -> None:
    plan = read_plan("grpo-arithmetic", settings)
    with VirtualCluster.of(plan.config.cluster, plan.device):
        for seed in seeds:
            place = folder / str(seed)
            make_tiny_model(place / "model", seed=0 if seed == QUICKSTART_SEED else seed)
            given = [f"policy.model_name={place / 'model'}", f"sft.seed={seed}", *settings]
            _train("sft-arithmetic", place / "sft", given)
            model = newest_checkpoint(place / "sft") / "hf"
            measured = ("grpo.val_at_start=true", "grpo.val_at_end=true", "grpo.val_period=8")
            _train(
                "grpo-arithmetic",
                place / "grpo",
                [f"policy.model_name={model}", f"grpo.seed={seed}", *GRPO, *measured, *settings],
            )


def _train(recipe: str, folder: Path, settings: Sequence[str]) -> None:
    if not (is_run(folder) and RunFolder(folder).state().status == "finished"):
        train(read_plan(recipe, [*settings, f"run_dir={folder}"]), run_dir=folder, title=recipe).exit_if_stopped()


def _measured(place: Path) -> list[float]:
    steps = int(RunFolder(place / "sft").last_metrics()["step"])
    lines = [json.loads(line) for line in (place / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    values = [line["val/accuracy"] for line in lines if "val/accuracy" in line]
    return [steps, *values, values[-1] - values[0]]


if __name__ == "__main__":
    main()
