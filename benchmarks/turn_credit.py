"""Steps until a policy answers the turn that matters, by advantages of whole rollouts and by advantages of turns.

    python benchmarks/turn_credit.py [--seeds 1 2 3] [--steps 60] [--folder runs/turn-credit]

A rollout has five turns, in each of which the tiny model of `sft-arithmetic` is asked for a sum. Only the answer to the
third counts. `grpo` gives the tokens of all five turns the same advantage, so four fifths of the gradient are noise;
`turn_returns` with the discount 0 gives a turn the advantage of its own reward. Every run is `rl train
grpo-arithmetic` on the CPU; a finished one in the folder is not made again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measurement import read_metrics, surroundings, table

ENVIRONMENT = '''
import random

from rl_core import StepResult

NUM_TURNS, COUNTED = 5, 2


class Sums:
    """Asks for a sum in every turn, and rewards the answer to the third one."""

    def step(self, conversations, states):
        return [self._answer(each, state) for each, state in zip(conversations, states)]

    def _answer(self, conversation, state):
        right = state["right"] if state else str(conversation.info["answer"])
        turn = conversation.turn
        reward = float(turn == COUNTED and conversation.completion.strip() == right)
        drawn = random.Random(f"{conversation.info['answer']} {turn}")
        a, b = drawn.randint(1, 3), drawn.randint(1, 3)
        asked = ({"role": "user", "content": f"{a}+{b}="},)
        return StepResult(reward, turn + 1 == NUM_TURNS, asked, {"right": str(a + b)})

    def close(self, states):
        pass
'''

ESTIMATORS = {
    "grpo": "grpo",
    "turn_returns, discount 0": "{name: turn_returns, discount: 0.0}",
    "turn_returns, discount 1": "turn_returns",
    "gigpo": "gigpo",
}
TARGET = 0.6
WINDOW = 3
"""Steps whose mean reward has to reach the target."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/turn-credit"))
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sums.py").write_text(ENVIRONMENT, encoding="utf-8")
    found = {
        name: [steps_to_target(run(folder, name, seed, chosen.steps)) for seed in chosen.seeds] for name in chosen.only
    }
    print(f"{surroundings('rl-launch', 'rl-algos')}\n")
    print(f"Steps until the mean reward of {WINDOW} steps is {TARGET}, of {chosen.steps}\n")
    print(table(("estimator", *(f"seed {seed}" for seed in chosen.seeds), "mean"), rows(found, chosen.steps)))
    if {"grpo", "turn_returns, discount 0"} <= found.keys():
        ours, theirs = (statistics.fmean(counted(found[name], chosen.steps)) for name in list(ESTIMATORS)[1::-1])
        print(f"\nturn_returns with the discount 0 needs {ours / theirs:.2f} times the steps of grpo")


def run(folder: Path, name: str, seed: int, steps: int) -> list[float]:
    """Rewards of the steps of a run."""
    run_dir = folder / f"{''.join(letter for letter in name if letter.isalnum())}-{seed}"
    if not (run_dir / "metrics.jsonl").exists() or len(read_metrics(run_dir)) < steps:
        settings = [
            f"grpo.adv_estimator={ESTIMATORS[name]}",
            f"grpo.seed={seed}",
            f"grpo.max_num_steps={steps}",
            "grpo.max_rollout_turns=5",
            "grpo.num_prompts_per_step=16",
            "grpo.val_period=0",
            "policy.train_global_batch_size=128",
            "policy.max_total_sequence_length=160",
            "policy.generation.backend=hf",
            "policy.generation.max_new_tokens=4",
            "data.validation=null",
            f"data.default.env_name={folder / 'sums.py'}:Sums",
            "checkpointing.enabled=false",
            "cluster.device=cpu",
            "cluster.cpu_ranks_per_node=1",
            f"run_dir={run_dir}",
        ]
        command = [sys.executable, "-m", "rl_launch.cli", "train", "grpo-arithmetic", *settings]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return [step["reward/mean"] for step in read_metrics(run_dir)]


def steps_to_target(rewards: Sequence[float]) -> int | None:
    """The step at whose end the mean of the last steps reaches the target; None if it does not."""
    for step in range(WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[step - WINDOW : step]) >= TARGET:
            return step
    return None


def counted(found: Sequence[int | None], steps: int) -> list[int]:
    """The steps of each run; all of them for one that did not reach the target."""
    return [steps if each is None else each for each in found]


def rows(found: dict[str, list[int | None]], steps: int) -> list[tuple[str, ...]]:
    """A row for each estimator."""
    return [
        (
            name,
            *("not reached" if each is None else str(each) for each in runs),
            f"{statistics.fmean(counted(runs, steps)):.1f}",
        )
        for name, runs in found.items()
    ]


if __name__ == "__main__":
    main()
