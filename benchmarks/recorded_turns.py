"""The time that a rollout worker spends on the completions that `rl replay` needs, next to its other work.

    uv run benchmarks/recorded_turns.py [--quick]

Groups of 16 completions, whose token ids and logprobs are drawn at random, are recorded (`logger.replay_enabled`) and
made into the columns that a loop reads and the records that people read, in turn. Reported are the least and the median
of processor milliseconds of a group by its length, the ratio of both, and the bytes that a token takes in `turns`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from measurement import surroundings, table

from rl_algos.rollouts.recorded import TurnsRecorder
from rl_core.rollouts.group import parts_of
from rl_core.rollouts.pool import RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, Turn, WeightSpan

GROUP = 16
LENGTHS = (128, 1024, 8192)
VOCABULARY = 150_000


def group_of(length: int, chance: np.random.Generator) -> tuple[Prompt, list[Rollout], list[RolloutTurns]]:
    """Return a prompt with its rollouts, and their turns."""
    prompt = Prompt("a", (), np.arange(100, dtype=np.int32), "math")
    rollouts, turns = [], []
    for _ in range(GROUP):
        tokens = chance.integers(0, VOCABULARY, length, dtype=np.int32)
        logprobs = -chance.exponential(0.5, length).astype(np.float32)
        completion = Completion(tokens, logprobs, "stop", (WeightSpan(3, length),))
        turns.append(RolloutTurns(completions={"request": completion}))
        rollouts.append(
            Rollout(
                prompt_id=prompt.id,
                tokens=np.concatenate([prompt.token_ids, tokens]),
                loss_mask=np.repeat(np.array([0, 1], np.uint8), [100, length]),
                generation_logprobs=np.concatenate([np.zeros(100, np.float32), logprobs]),
                spans=(WeightSpan(3, length),),
                turns=(Turn("word " * length, None, {"reward": 1.0}),),
                rewards={"reward": 1.0},
                stop_reason="stop",
            )
        )
    return prompt, rollouts, turns


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    num_rounds = 1 if parser.parse_args().quick else 15
    chance, rows = np.random.default_rng(0), []
    for length in LENGTHS:
        recording, columns = [], []
        with tempfile.TemporaryDirectory() as folder:
            recorder = TurnsRecorder(Path(folder))
            for number in range(num_rounds):
                prompt, rollouts, turns = group_of(length, chance)
                began = time.process_time()
                recorder.write(str(number), turns)
                between = time.process_time()
                parts_of([(prompt, [dataclasses.replace(each) for each in rollouts])])
                recording.append(1000 * (between - began))
                columns.append(1000 * (time.process_time() - between))
            num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        ratios = [mine / other for mine, other in zip(recording, columns, strict=True)]
        num_tokens = GROUP * length
        rows.append(
            [
                f"{length:,}",
                f"{min(recording):.2f}",
                f"{median(recording):.2f}",
                f"{median(columns):.2f}",
                f"{median(ratios):.1f}",
                f"{1000 * median(recording) / num_tokens:.2f}",
                f"{num_bytes / num_rounds / num_tokens:.1f}",
            ]
        )
    sys.stdout.write(f"{surroundings('rl-algos', 'rl-core', 'numpy')}\n{GROUP} completions, {num_rounds} rounds\n\n")
    head = ["tokens of a completion", "least, ms", "median, ms", "its other work, ms", "ratio", "us a token", "bytes"]
    sys.stdout.write(table(head, rows) + "\n")


if __name__ == "__main__":
    main()
