"""Processor seconds of training rows that begin alike, with their shared prefixes computed once and for each row.

    python packages/rl-dtensor/benchmarks/shared_prefixes.py

Both ways train the same model on the same rows under the same budget of tokens, from the same weights, and take steps
in turn (A B A B). The ratio is the median of the ratios of neighbours. Losses of all steps must agree, which they would
not if a row saw the tokens of another branch, or if a gradient was not counted once for each row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from figures import median, surroundings, table
from training import NextToken, Size, config_of, one_rank

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model_config import SequencePackingConfig

SIZE = Size(128, 2, 2, 1, vocab=512, inner=384)
QUICK = Size(64, 2, 2, 1, vocab=256, inner=128, head_dim=32)
MAX_DIFFERENCE = 1e-4
"""Of the losses of one step, relative."""

WAYS = (False, True)
"""Values of `shared_prefixes`, in turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each way (%(default)s)")
    parser.add_argument("--budget", type=int, default=4608, help="tokens of a microbatch (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="on cuda, wall seconds are measured")
    parser.add_argument("--quick", action="store_true", help="see that it runs: few tokens, a small model, one round")
    chosen = parser.parse_args()
    size, scale, rounds = (QUICK, 8, 1) if chosen.quick else (SIZE, 1, chosen.rounds)
    torch.set_num_threads(chosen.threads)
    print(f"{surroundings('rl-dtensor', 'torch', 'transformers')}; {chosen.device}, {chosen.threads} threads")
    print(f"{size}, float32; {rounds} steps of each way, in turn; microbatches of {chosen.budget} tokens\n")
    cases = {
        "8 completions of 64, prompt of 512": groups(2, 8, 512 // scale, 64 // scale, size.vocab),
        "8 completions of 256, prompt of 256": groups(2, 8, 256 // scale, 256 // scale, size.vocab),
        "agent, 10 turns of 100, every third left again": agent(10, 100 // scale, size.vocab),
        "8 completions of 512, prompt of 32": groups(1, 8, 32 // scale, 512 // scale, size.vocab),
    }
    rows = []
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = size.write(Path(scratch))
        for name, tokens in cases.items():
            rows.append((name, *measured(folder, tokens, chosen.budget, rounds, chosen.device)))
    print(table(["rows", "tokens", "distinct", "s apart", "s shared", "ratio", "range"], rows))


def measured(folder: Path, tokens: Sequence[np.ndarray], budget: int, rounds: int, device: str) -> tuple[str, ...]:
    """The row of one case; ends if losses differ."""
    batch = Batch({"tokens": Ragged.from_rows(tokens, dtype=np.int32)})
    taken: dict[bool, list[float]] = {way: [] for way in WAYS}
    shared = 0.0
    for _ in range(rounds):
        losses = []
        for way in WAYS:
            packing = SequencePackingConfig(train_mb_tokens=budget, logprob_mb_tokens=budget, shared_prefixes=way)
            with one_rank(config_of(folder, budget, sequence_packing=packing), device) as worker:
                worker.train_step(batch.select(range(2)), NextToken())
                clock = time.process_time if device == "cpu" else time.perf_counter
                started = clock()
                metrics = worker.train_step(batch, NextToken())
                taken[way].append(clock() - started)
                losses.append(metrics["loss"].value)
                shared = metrics["shared_tokens"].result() if way else 0.0
        if not max(losses) - min(losses) <= MAX_DIFFERENCE * abs(max(losses)):
            sys.exit(f"losses differ: {losses}")
    ratios = [together / apart for apart, together in zip(taken[False], taken[True], strict=True)]
    return (
        str(int(batch.lengths.sum())),
        f"{1 - shared:.1%}",
        f"{median(taken[False]):.2f}",
        f"{median(taken[True]):.2f}",
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
    )


def groups(num_groups: int, num_rows: int, prompt: int, completion: int, vocab: int) -> list[np.ndarray]:
    """Rows of groups with a prompt of their own."""
    random, rows = np.random.default_rng(0), []
    for _ in range(num_groups):
        beginning = random.integers(3, vocab, prompt)
        rows += [np.concatenate([beginning, random.integers(3, vocab, completion)]) for _ in range(num_rows)]
    return rows


def agent(num_turns: int, turn: int, vocab: int) -> list[np.ndarray]:
    """Segments of a rollout, each of which continues the history; every third is left again."""
    random = np.random.default_rng(0)
    history, rows = random.integers(3, vocab, turn), []
    for number in range(1, num_turns + 1):
        rows.append(np.concatenate([history, random.integers(3, vocab, turn)]))
        history = history if number % 3 == 0 else rows[-1]
    return rows


if __name__ == "__main__":
    main()
