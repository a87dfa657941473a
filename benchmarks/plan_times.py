"""Processor seconds of training in tiny recipes, and what `rl plan` says of them with the factor of the first one.

    python benchmarks/plan_times.py

The policy's worker of each recipe trains steps in this process, on one core, with rows of one length. Processor time
does not depend on what else the machine does, unlike the seconds that a run records.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from statistics import median

import torch
from measurement import surroundings, table

from rl_algos.tiny_model import make_tiny_model
from rl_core.devices import CPU
from rl_core.model import ModelSpec, Rendezvous
from rl_core.plugins import resolve
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.rank_pool import free_port
from rl_core.testing.model_worker import make_batch
from rl_launch.planning.accelerators import accelerator_named
from rl_launch.planning.plan import TRAINING, plan_run
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.reading import read_plan

ROW = 12
"""Tokens of a row."""
CASES = (
    ("sft-arithmetic", ()),
    ("sft-arithmetic", ("policy.train_global_batch_size=256",)),
    ("dpo-tiny", ()),
    ("rm-tiny", ()),
    ("grpo-arithmetic", ()),
)


def measured(recipe: str, overrides: tuple[str, ...], folder: str, steps: int) -> tuple[float, float]:
    """Return the planned and the measured seconds of training of a step."""
    tiny = ("cluster.cpu_ranks_per_node=1", "cluster.device=cpu", f"policy.model_name={folder}")
    run = read_plan(recipe, [*tiny, *overrides])
    model = run.backends.models["policy"]
    lengths = Lengths(ROW / 2, ROW / 2) if run.plugin.generates else Lengths(None, ROW)
    plan = plan_run(run, recipe, accelerator=accelerator_named("cpu"), device=CPU, lengths=lengths)
    place = Rendezvous(0, 1, 0, "127.0.0.1", free_port(), "cpu", 300)
    worker = resolve(model.plugin.worker)(model.config, model.backend, ModelSpec(), place)
    updates = plan.work.updates
    batch = make_batch((ROW,) * (plan.work.num_rows * plan.work.passes // updates), vocab=90)
    seconds = []
    for _ in range(steps + 1):
        began = time.process_time()
        for _ in range(updates):
            worker.train_step(batch, TokenLoss())
        seconds.append(time.process_time() - began)
    worker.close()
    return plan.seconds[TRAINING], median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="see that it runs: two recipes")
    quick = parser.parse_args().quick
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rows, factor = [], None
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder)
        for recipe, overrides in CASES[: 2 if quick else None]:
            planned, took = measured(recipe, overrides, folder, 1 if quick else 4)
            factor = factor or took / planned
            name = " ".join((recipe, *overrides))
            rows.append((name, f"{took:.3f}", f"{planned * factor:.3f}", f"{planned * factor / took:.2f}"))
    sys.stdout.write(f"{surroundings('rl-dtensor')}\n\n")
    sys.stdout.write(f"{table(('recipe', 'measured, s', 'planned, s', 'planned / measured'), rows)}\n")


if __name__ == "__main__":
    main()
