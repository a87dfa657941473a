"""How many drafted tokens are accepted while the policy moves away from where its drafter began, with a drafter that
stays as it is and with one that trains in every step.

    python benchmarks/drafter_in_step.py [--steps 30] [--seeds 1]

Both runs are what `rl train grpo-arithmetic` makes on the CPU, with a reward that the warmed-up model hardly earns: the
share of sevens among 16 characters. The policy learns within a few updates to write something else than sums. The
drafter begins as a copy of the policy, the best that a frozen one can be.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from measurement import read_metrics, rl_command, run_logged, surroundings, table

from rl_launch.commands.train import local_model

REWARD = '''"""The share of sevens."""


def sevens(response: str) -> float:
    return response.count("7") / 16
'''

SETTINGS = (
    "cluster.device=cpu",
    "cluster.cpu_ranks_per_node=1",
    "grpo.num_prompts_per_step=16",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "data.validation=null",
    "data.train.env_name=sevens.py:sevens",
    "policy.train_global_batch_size=128",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.generation.max_new_tokens=16",
    "policy.generation.backend=vllm",
)
DRAFTER = (
    "drafter.precision=float32",
    "drafter.max_total_sequence_length=32",
    "drafter.train_micro_batch_size=64",
    "drafter.sequence_packing={enabled: false}",
    "drafter.optimizer.kwargs.lr=1e-3",
)
PARTS = 5
"""Rows of the table; each is the mean of a part of the steps."""


def main() -> None:
    """Make both runs for every seed and print their acceptance by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps, one update of the policy each (default 30)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="SEED")
    options = parser.parse_args()
    print(surroundings("rl-core", "rl-launch", "rl-vllm"), end="\n\n")
    with tempfile.TemporaryDirectory(prefix="rl-drafter-") as scratch:
        folder = Path(scratch)
        (folder / "sevens.py").write_text(REWARD, encoding="utf-8")
        shutil.copytree(local_model("tiny-arithmetic-sft"), folder / "drafter")
        for seed in options.seeds:
            found = {name: made(folder, name, options.steps, seed) for name in ("frozen", "trained")}
            print(f"Seed {seed}:\n\n{shown(found)}\n", flush=True)


def made(folder: Path, name: str, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Make a run whose drafter is frozen or trained; returns its metrics by step."""
    drafter = folder / "drafter"
    speculation = f"policy.generation.vllm_cfg.speculation={{method: draft_model, model: {drafter}, num_tokens: 3}}"
    trained = (f"drafter.model_name={drafter}", *DRAFTER) if name == "trained" else ()
    settings = (*SETTINGS, speculation, *trained, f"grpo.max_num_steps={num_steps}", f"grpo.seed={seed}")
    run_rl(folder, "grpo-arithmetic", f"{name}-{seed}", *settings)
    return read_metrics(folder / f"{name}-{seed}")


def run_rl(folder: Path, recipe: str, name: str, *settings: str) -> None:
    """Train in a folder's subfolder of this name."""
    command = rl_command("train", recipe, f"run_dir={folder / name}", *settings)
    run_logged(["env", "-C", str(folder), *command], folder / f"{name}.log")


def shown(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The table of both runs."""
    head = ["steps", *(f"{what}, {name}" for what in ("accepted", "tokens per step", "reward") for name in found)]
    keys = ("speculation/acceptance_rate", "speculation/tokens_per_step", "reward/mean")
    num_steps = min(len(rows) for rows in found.values())
    bounds = [num_steps * part // PARTS for part in range(PARTS + 1)]
    lines = []
    for start, end in pairwise(bounds):
        means = [fmean(row[key] for row in rows[start:end]) for key in keys for rows in found.values()]
        lines.append([f"{start + 1} to {end}", *(f"{mean:.2f}" for mean in means)])
    return table(head, lines)


if __name__ == "__main__":
    main()
