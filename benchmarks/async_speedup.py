"""Seconds of a step of asynchronous runs beside the synchronous run, on real engines, and a timeline of both sides.

    python benchmarks/async_speedup.py [--png FILE] [--steps 12]

Every run is what `rl train` makes: GRPO of a tiny model on the CPU, vLLM on a device of its own, an environment that
scores, verified weight sync. An untrained model ends a completion with equal chance at every token, so lengths are
geometric: their 99th percentile is six to seven times their median. The learning rate is 0, so that lengths stay as
they are. One core trains and one generates, and nothing else should use them.

All figures are the runs' own, from `metrics.jsonl`. The timeline lays the phases of the driver end to end; the bar of
the generators spans the time between the ends of two collects, and its height is their busy share of that time,
`1 - idle/generators`. Both sides work at the same time for at least `1 - idle/trainer - idle/generators` of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measurement import read_metrics, rl_command, run_logged, surroundings, table

APART = (
    "policy.model_name=tiny-arithmetic",
    "policy.optimizer.kwargs.lr=0.0",
    "policy.train_micro_batch_size=8",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.vllm_cfg.max_num_seqs=128",
    "cluster.device=cpu",
    "cluster.cpu_ranks_per_node=2",
    "loss_fn.importance.high=2",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "checkpointing.metric_name=null",
    "logger.tensorboard_enabled=false",
)
AHEAD = "grpo.async_grpo.enabled=true"
IN_FLIGHT = "grpo.async_grpo.in_flight_weight_updates=true"
SYNCHRONOUS = "synchronous"
CASES: Mapping[str, tuple[str, ...]] = {
    SYNCHRONOUS: (),
    "staleness 1": (AHEAD, "grpo.async_grpo.max_trajectory_age_steps=1"),
    "staleness 2, in flight": (AHEAD, "grpo.async_grpo.max_trajectory_age_steps=2", IN_FLIGHT),
}
PHASES = {"generation": "tab:gray", "logprobs": "tab:olive", "training": "tab:blue", "weight_sync": "tab:red"}
"""Of the driver, in their order within a step, and their colours; `generation` is its wait for rollouts."""

Rows = Sequence[Mapping[str, Any]]


def main() -> None:
    """Make a run of each case, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each run (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="first steps that are left out (%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, four rollouts each (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="most tokens of a completion (%(default)s)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the timeline; needs matplotlib")
    parser.add_argument("--quick", action="store_true", help="see that it runs: four short steps")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.steps, chosen.warm_up, chosen.prompts, chosen.tokens = 4, 1, 4, 32
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        runs = {name: made(Path(scratch), name, settings, chosen) for name, settings in CASES.items()}
    sys.stdout.write(f"{surroundings('rl-launch', 'rl-algos', 'torch')}\n\n{described(chosen)}\n\n")
    baseline = step_seconds(runs[SYNCHRONOUS][chosen.warm_up :])
    sys.stdout.write(table(HEAD, [cells(name, rows[chosen.warm_up :], baseline) for name, rows in runs.items()]) + "\n")
    if chosen.png is not None:
        draw(runs, chosen.png)
        sys.stdout.write(f"\n{chosen.png}\n")


def made(scratch: Path, name: str, settings: Sequence[str], chosen: argparse.Namespace) -> Rows:
    """Return the metrics of each step of a run."""
    folder = scratch / name.replace(", ", "-").replace(" ", "-")
    sizes = (
        f"grpo.num_prompts_per_step={chosen.prompts}",
        "grpo.num_generations_per_prompt=4",
        f"grpo.max_num_steps={chosen.steps}",
        f"policy.train_global_batch_size={4 * chosen.prompts}",
        f"policy.logprob_batch_size={4 * chosen.prompts}",
        f"policy.generation.max_new_tokens={chosen.tokens}",
        f"policy.max_total_sequence_length={chosen.tokens + 32}",
    )
    command = rl_command("train", "grpo-arithmetic", *APART, *sizes, *settings, f"run_dir={folder}")
    run_logged(command, scratch / f"{folder.name}.log")
    return read_metrics(folder)


def described(chosen: argparse.Namespace) -> str:
    return (
        f"{chosen.prompts} prompts of 4 rollouts of at most {chosen.tokens} tokens a step; medians of the "
        f"{chosen.steps - chosen.warm_up} steps after the first {chosen.warm_up}."
    )


def step_seconds(rows: Rows) -> float:
    """Return the median seconds of a step."""
    return median(row["time/step"] for row in rows)


HEAD = (
    "",
    "step, s",
    "speed-up",
    *(f"{phase.replace('_', ' ')}, s" for phase in PHASES),
    "trainer idle",
    "generators idle",
    "both at work, at least",
    "mean length",
)


def cells(name: str, rows: Rows, baseline: float) -> tuple[str, ...]:
    """Return a row of the table."""
    took = step_seconds(rows)
    phases = [f"{median(row.get(f'time/{phase}', 0.0) for row in rows):.2f}" for phase in PHASES]
    trainer = median(waits(row) for row in rows)
    generators = median(1 - busy(row) for row in rows)
    overlap = max(0.0, 1 - trainer - generators)
    length = median(row["rollout/mean_length"] for row in rows)
    shares = [f"{share:.0%}" for share in (trainer, generators, overlap)]
    return (name, f"{took:.2f}", f"{baseline / took:.2f}", *phases, *shares, f"{length:.0f}")


def waits(row: Mapping[str, Any]) -> float:
    """Return the share of a step in which training waited for rollouts."""
    waited: float = row["time/generation"] / row["time/step"]
    return waited


def busy(row: Mapping[str, Any]) -> float:
    """Return the share of a step in which the generators had rollouts: in a synchronous run while training waits for
    them."""
    return 1 - row["idle/generators"] if "idle/generators" in row else waits(row)


def draw(runs: Mapping[str, Rows], path: Path) -> None:
    """Draw two lanes for each run: the phases of the driver, and the busy share of the generators."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.7 * len(runs) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(runs), 1, sharex=True)
    for axes, (name, rows) in zip(all_axes, runs.items(), strict=True):
        begun = collected_before = 0.0
        for row in rows:
            at = begun
            for phase, color in PHASES.items():
                took = row.get(f"time/{phase}", 0.0)
                axes.broken_barh([(at, took)], (1.1, 0.8), color=color, alpha=0.35 if phase == "generation" else 1)
                at += took
                if phase == "generation":
                    # a synchronous run generates during that phase alone
                    since = collected_before if "idle/generators" in row else begun
                    height = 0.8 * busy(row) if "idle/generators" in row else 0.8
                    axes.broken_barh([(since, at - since)], (0.1, height), color="tab:green", edgecolor="white")
                    collected_before = at
            begun += row["time/step"]
            axes.axvline(begun, color="black", linewidth=0.4, alpha=0.4)
        axes.set_yticks([0.5, 1.5], ["generators", "driver"], fontsize=8)
        axes.set_ylim(0, 2)
        axes.set_title(name, fontsize=9, loc="left")
    all_axes[-1].set_xlabel("seconds since the first step", fontsize=9)
    handles = [figure.axes[0].barh([0], [0], color=color, label=phase) for phase, color in PHASES.items()]
    figure.legend(handles=handles, ncols=len(handles), fontsize=8, loc="outside upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
