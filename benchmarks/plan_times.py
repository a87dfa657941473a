"""Processor seconds of training in tiny recipes, and what `rl plan` says of them with the factor of the first one.

    python benchmarks/plan_times.py [--runs]

The policy's worker of each recipe trains steps in this process, on one core, with rows of one length. Processor time
does not depend on what else the machine does, unlike the seconds that a run records.

With --runs, whole runs of GRPO follow, with generation by vLLM on a core of its own: seconds of a step beside the plan
with the factors that the first run taught, and each run with rollouts ahead of training beside what is simulated from
the one without. They need an idle machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

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
from rl_launch.planning.learned import learn, learned, measured_lengths, measured_seconds
from rl_launch.planning.plan import TRAINING, Plan, plan_run
from rl_launch.planning.what_if import RunFacts, cases
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.directory.run_folder import RunFolder

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


RUN = (
    "policy.model_name=tiny-arithmetic",
    "policy.generation.colocated.enabled=false",
    "cluster.device=cpu",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "cluster.cpu_ranks_per_node=2",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "checkpointing.metric_name=null",
)
RUNS = (
    (),
    ("grpo.num_generations_per_prompt=4",),
    ("policy.generation.max_new_tokens=24", "policy.max_total_sequence_length=48"),
    ("grpo.num_prompts_per_step=96", "policy.train_global_batch_size=256"),
)
"""Runs of `grpo-arithmetic`; the first one teaches."""
AHEAD = ("grpo.async_grpo.enabled=true", "loss_fn.importance.high=2")
"""Rollouts one step ahead of training."""


def trained(overrides: tuple[str, ...], folder: Path, steps: int) -> tuple[RunFolder, Plan, float]:
    """Run GRPO; return the run, its plan with its own lengths, and the median seconds of its steps."""
    settings = (*RUN, *overrides, f"grpo.max_num_steps={steps}", f"run_dir={folder}")
    rl = Path(sys.executable).with_name("rl")
    subprocess.run([str(rl), "train", "grpo-arithmetic", *settings], check=True, stdout=subprocess.DEVNULL)
    run, read = RunFolder(folder), read_plan(str(folder))
    cpu: dict[str, Any] = {"accelerator": accelerator_named("cpu"), "device": CPU}
    lengths = measured_lengths(run.metrics(), plan_run(read, "run", **cpu).work)
    plan = plan_run(read, "run", **cpu, lengths=lengths, factors=learned("cpu"))
    return run, plan, measured_seconds(run.metrics())["step"]


def runs(steps: int, count: int) -> list[tuple[str, ...]]:
    """Return the rows of whole runs."""
    rows = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["RL_HOME"] = home
        for place, overrides in enumerate(RUNS[:count]):
            run, plan, took = trained(overrides, Path(home) / str(place), steps)
            planned = plan.step_seconds
            if place == 0:
                learn(run, plan)
                planned = took
            name = " ".join(("grpo-arithmetic", *overrides))
            rows.append((name, took, planned))
            _, _, ahead = trained((*overrides, *AHEAD), Path(home) / f"{place}-ahead", steps)
            simulated = (case for case in cases(RunFacts.of_run(run, plan)) if case.name == "staleness 1")
            rows.append((f"the same with {AHEAD[0]}, simulated", ahead, next(simulated).found.step_seconds))
    return [(name, f"{took:.2f}", f"{planned:.2f}", f"{planned / took:.2f}") for name, took, planned in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="see that it runs: two recipes")
    parser.add_argument("--runs", action="store_true", help="whole runs of GRPO too: five minutes")
    given = parser.parse_args()
    quick = given.quick
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
    head = ("recipe", "measured, s", "planned, s", "planned / measured")
    sys.stdout.write(f"{table(head, rows)}\n")
    if given.runs:
        sys.stdout.write(f"\n{table(head, runs(4 if quick else 10, 1 if quick else len(RUNS)))}\n")


if __name__ == "__main__":
    main()
