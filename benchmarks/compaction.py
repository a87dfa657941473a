"""Reward of a policy that remembers over a compaction, by who writes the summaries: the policy or fixed weights.

    python benchmarks/compaction.py [--seeds 1 2 3] [--warm-up 30] [--steps 100] [--only NAME ...] [--folder FOLDER]

The tiny model of `sft-arithmetic` is asked for a sum in the second turn of a conversation, and for its result again in
the last one. In between, the conversation becomes longer than `compact_at`, so that the last answer can only come from
the summary. Only the last answer is rewarded, so the policy has to learn what to write into a summary as well as how to
use it. With `frozen`, the model as it was at the start writes the summaries, and the policy can only learn to use them.
A guess is right in half of the cases.

All runs begin with one model that has learned to answer from the whole conversation, without compactions. Its warm-up
is short: a model that always gives one answer explores no summaries. Every run is `rl train grpo-arithmetic` on the
CPU; a finished one in the folder is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measurement import read_metrics, surroundings, table

ENVIRONMENT = '''
from rl_core import StepResult

ASKED = ["{sum}", ".", "?"]


class Memory:
    """Asks for a sum, says nothing of interest, and rewards its result at the end; an answer that may be a result of
    another row earns a fifth, so that guesses are learned first."""

    def step(self, conversations, states):
        return [self._answer(each) for each in conversations]

    def _answer(self, conversation):
        turn, info, said = conversation.turn, conversation.info, conversation.completion.strip()
        if turn == len(ASKED):
            is_right = said == info["answer"]
            return StepResult({"reward": 1.0 if is_right else 0.2 * (said in ("1", "2")), "right": float(is_right)})
        return StepResult(done=False, observation=({"role": "user", "content": ASKED[turn].format(sum=info["sum"])},))

    def close(self, states):
        pass
'''
SUMS = ((0, 1), (1, 0), (1, 1), (2, 0))
"""Sums whose results are 1 and 2, each as often."""

SUMMARISERS = {"policy": "{}", "frozen": "{frozen: {opponent: {update_every: 100000}}}"}
"""Agents of the run, by who summarises. An opponent begins with the weights of the start."""

WINDOW = 5
"""Steps at the start and at the end whose mean share of right answers is shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="N")
    parser.add_argument("--warm-up", type=int, default=30, metavar="STEPS")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=SUMMARISERS, default=list(SUMMARISERS), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/compaction"))
    chosen = parser.parse_args()
    folder = chosen.folder.absolute()
    write_task(folder)
    start = warmed_up(folder, chosen.warm_up)
    found = {name: [run(folder, start, name, seed, chosen.steps) for seed in chosen.seeds] for name in chosen.only}
    print(f"{surroundings('rl-launch', 'rl-algos')}\n")
    print(f"Share of right answers in the first and in the last {WINDOW} of {chosen.steps} steps\n")
    print(table(("summaries by", "start", *(f"seed {seed}" for seed in chosen.seeds), "mean"), rows(found)))


def write_task(folder: Path) -> None:
    """Write the environment, and a row for each sum."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.py").write_text(ENVIRONMENT, encoding="utf-8")
    lines = [json.dumps({"prompt": "?", "sum": f"{a}+{b}=", "answer": str(a + b)}) for a, b in SUMS]
    (folder / "sums.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def warmed_up(folder: Path, steps: int) -> Path:
    """Return a model that answers from the whole conversation."""
    train(folder, folder / "warm-up", steps, f"checkpointing.save_period={steps}", "checkpointing.metric_name=null")
    return folder / f"warm-up/checkpoints/step_{steps}/hf"


def run(folder: Path, start: Path, name: str, seed: int, steps: int) -> list[float]:
    """Return the share of right answers in each step of a run."""
    settings = [
        f"policy.model_name={start}",
        "grpo.rollout_program=compaction",
        # Up to the answer to the second turn, the conversation has 19 tokens.
        f"grpo.rollout_program_args={{compact_at: 18, summary_tokens: 3, request: '!', summariser: {name}}}",
        f"grpo.agents={SUMMARISERS[name]}",
        f"grpo.seed={seed}",
        "checkpointing.enabled=false",
    ]
    return train(folder, folder / f"{name}-{seed}", steps, *settings)


def train(folder: Path, run_dir: Path, steps: int, *settings: str) -> list[float]:
    """Train on the task unless it has been done, and return the share of right answers in each step."""
    if not (run_dir / "metrics.jsonl").exists() or len(read_metrics(run_dir)) < steps:
        shared = [
            f"grpo.max_num_steps={steps}",
            "grpo.max_rollout_turns=4",
            "grpo.num_prompts_per_step=8",
            "grpo.num_generations_per_prompt=16",
            "grpo.val_period=0",
            "policy.train_global_batch_size=128",
            "policy.max_total_sequence_length=48",
            "policy.optimizer.kwargs.lr=6e-4",
            "policy.generation.backend=hf",
            "policy.generation.max_new_tokens=3",
            f"data.train={{data_path: {folder / 'sums.jsonl'}}}",
            "data.validation=null",
            f"data.default.env_name={folder / 'memory.py'}:Memory",
            "cluster.device=cpu",
            "cluster.cpu_ranks_per_node=1",
            "cluster.env_vars={OMP_NUM_THREADS: '1', MKL_NUM_THREADS: '1'}",
            f"run_dir={run_dir}",
        ]
        command = [sys.executable, "-m", "rl_launch.cli", "train", "grpo-arithmetic", *shared, *settings]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return [step["reward/right"] for step in read_metrics(run_dir)]


def rows(found: dict[str, list[list[float]]]) -> list[tuple[str, ...]]:
    """Return a row for each summariser."""
    cells = []
    for name, runs in found.items():
        first, last = ([statistics.fmean(part(values)) for values in runs] for part in (start_of, end_of))
        cells.append((name, *(f"{value:.2f}" for value in (statistics.fmean(first), *last, statistics.fmean(last)))))
    return cells


def start_of(values: Sequence[float]) -> Sequence[float]:
    """Return the values of the first steps."""
    return values[:WINDOW]


def end_of(values: Sequence[float]) -> Sequence[float]:
    """Return the values of the last steps."""
    return values[-WINDOW:]


if __name__ == "__main__":
    main()
