"""Steps until a policy answers the turn that matters, by advantages of whole rollouts and by advantages of turns.

    python benchmarks/turn_credit.py [--seeds 1 2 3] [--folder runs/turn-credit] [--jobs 2]

A rollout has five turns. Each asks for the digit of one of eight letters, and only the third answer is rewarded. `grpo`
gives the tokens of all turns the same advantage, so four fifths of its gradient are noise; `turn_returns` with the
discount 0 gives a turn the advantage of its own reward, and `mt_grpo` and `gigpo` add such an advantage to one of the
whole rollout. All start from the same tiny model, which SFT on mostly wrong digits has taught to answer right in a
third of the turns, and each runs with every learning rate of a small grid, of which its best counts. Every run is `rl
train` on the CPU with the generator `hf`; finished runs in the folder are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from learning import ON_CPU, UNCHOSEN, Task, in_jobs, is_finished
from measurement import surroundings, table

from rl_algos.tiny_model import make_tiny_model
from rl_launch.run_session.directory.run_folder import RunFolder

LETTERS, DIGITS, NUM_TURNS = "abcdefgh", "01234567", 5
RIGHT = 0.25
"""Share of the turns of SFT that have the right digit; the others have any digit."""

ESTIMATORS = {
    # estimator: its setting, and the steps it gets
    "turn_returns": ("{name: turn_returns, discount: 0.0}", 60),
    "mt_grpo": ("mt_grpo", 60),
    "gigpo": ("gigpo", 60),
    "grpo": ("grpo", 120),
}
RATES = (1e-3, 2e-3, 4e-3)
TARGET = 0.6
WINDOW = 5
"""Steps whose mean reward has to reach the target."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N")
    parser.add_argument("--only", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS), metavar="NAME")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="LR")
    parser.add_argument("--folder", type=Path, default=Path("runs/turn-credit"), help="of the runs (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    parser.add_argument("--table", action="store_true", help="start nothing: show the runs that are finished")
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    if not chosen.table:
        make_runs(folder, chosen.only, chosen.rates, chosen.seeds, chosen.jobs)
    found = {
        (name, rate): [steps_to_target(run_dir(folder, name, rate, seed)) for seed in chosen.seeds]
        for name in chosen.only
        for rate in chosen.rates
    }
    print(f"{surroundings('rl-launch', 'rl-algos')}\n")
    print(f"Steps until the mean reward of {WINDOW} steps is {TARGET}\n")
    rows = [
        (name, f"{rate:g}", *map(shown, runs), f"{mean(name, runs):.1f}" if None not in runs else "")
        for (name, rate), runs in found.items()
    ]
    print(table(("estimator", "learning rate", *(f"seed {seed}" for seed in chosen.seeds), "mean"), rows))
    best = {
        name: min(
            (mean(each, runs) for (each, _), runs in found.items() if each == name and None not in runs), default=0
        )
        for name in chosen.only
    }
    sums = best.pop("grpo", 0)
    for name, steps in best.items():
        if sums and steps:
            print(f"\nAt their best rates, {name} needs {steps / sums:.2f} of the steps of grpo")


def make_runs(
    folder: Path, estimators: Sequence[str], rates: Sequence[float], seeds: Sequence[int], num_jobs: int
) -> None:
    """Make the data, the model to start from and all runs that are not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(0)
    asked = ["".join(drawn.choices(LETTERS, k=NUM_TURNS)) for _ in range(4000)]
    prompts, lessons = folder / "prompts.jsonl", folder / "lessons.jsonl"
    write(prompts, [{"messages": user(letters[0]), "info": {"letters": letters}} for letters in asked])
    write(lessons, [{"messages": [each for letter in letters for each in lesson(letter, drawn)]} for letters in asked])
    if not (folder / "model").is_dir():
        sizes = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_key_value_heads": 1}
        make_tiny_model(folder / "model", characters=LETTERS + DIGITS, **sizes)
    start = folder / "warm"
    if not is_finished(start):
        keys = (f"policy.model_name={folder / 'model'}", f"data.train.data_path={lessons}", "data.validation=null")
        lengths = ("policy.max_total_sequence_length=32", "policy.train_global_batch_size=64")
        steps = ("policy.optimizer.kwargs.lr=1e-2", "sft.max_num_steps=250", "checkpointing.save_period=250")
        in_jobs([Task("sft-arithmetic", [*ON_CPU, *keys, *lengths, *steps], start)], 1)
    model = RunFolder(start).checkpoints()[-1].path / "hf"
    environment = Path(__file__).with_name("several_turns.py")
    tasks = [
        Task(
            "grpo-arithmetic",
            [
                *ON_CPU,
                f"policy.model_name={model}",
                f"policy.optimizer.kwargs.lr={rate}",
                "policy.train_global_batch_size=16",
                "policy.generation.backend=hf",
                "policy.generation.max_new_tokens=1",
                f"policy.generation.stop_strings={json.dumps(list(DIGITS))}",  # a digit ends its turn
                f"grpo.adv_estimator={ESTIMATORS[name][0]}",
                f"grpo.seed={seed}",
                f"grpo.max_num_steps={ESTIMATORS[name][1]}",
                f"grpo.max_rollout_turns={NUM_TURNS}",
                "grpo.num_prompts_per_step=4",
                "grpo.num_generations_per_prompt=4",
                f"data.train.data_path={prompts}",
                f"data.default.env_name={environment}:Letters",
                "data.validation=null",
                UNCHOSEN,
                "checkpointing.save_period=40",
            ],
            run_dir(folder, name, rate, seed),
        )
        for seed in seeds
        for rate in rates
        for name in estimators
    ]
    in_jobs([task for task in tasks if not is_finished(task.run)], num_jobs)


def run_dir(folder: Path, name: str, rate: float, seed: int) -> Path:
    return folder / f"{name}-{rate:g}-{seed}"


def user(letter: str) -> list[dict[str, str]]:
    """Return a question."""
    return [{"role": "user", "content": letter}]


def lesson(letter: str, drawn: random.Random) -> list[dict[str, str]]:
    """Return a question and the digit that SFT teaches."""
    digit = DIGITS[LETTERS.index(letter)] if drawn.random() < RIGHT else drawn.choice(DIGITS)
    return [*user(letter), {"role": "assistant", "content": digit}]


def write(path: Path, rows: Sequence[object]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def steps_to_target(run: Path) -> int | None:
    """Return the step at whose end the mean reward of the last steps reaches the target, 0 if none does, and None if
    the run is not finished."""
    if not is_finished(run):
        return None
    rewards = [row["reward/mean"] for row in RunFolder(run).metrics() if row.get("reward/mean") is not None]
    reached = (
        step for step in range(WINDOW, len(rewards) + 1) if statistics.fmean(rewards[step - WINDOW : step]) >= TARGET
    )
    return next(reached, 0)


def shown(steps: int | None) -> str:
    """Return the steps of a run as text."""
    return "" if steps is None else str(steps or "not reached")


def mean(name: str, runs: Sequence[int | None]) -> float:
    """Return the mean over runs; one that did not reach the target counts with all its steps."""
    return statistics.fmean(steps or ESTIMATORS[name][1] for steps in runs)


if __name__ == "__main__":
    main()
