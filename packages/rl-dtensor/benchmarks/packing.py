"""Tokens per second of training with rows packed, padded, and padded by like lengths; fill rates of packing algorithms.

    python packages/rl-dtensor/benchmarks/packing.py

All layouts train the same model on the same rows of skewed lengths under the same budget: padded microbatches have
`--microbatch` rows of at most `--longest` tokens, the others the product of the two in tokens. Only tokens of rows
count, padding does not. Layouts take steps in turn, each round with new workers on the same weights, and their losses
must agree.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from figures import median, seconds, surroundings, table
from training import LENGTHS, NextToken, Size, alike, batch_of, config_of, one_rank, packed, padded, skewed_lengths

from rl_core.data.batch import Batch
from rl_core.data.microbatch import Batching, plan_microbatches
from rl_core.model_config import ModelConfig

SIZE = Size(256, 2, 4, 2, vocab=1024, inner=768)
QUICK = Size(64, 2, 2, 1, vocab=256, inner=128, head_dim=32)
MAX_DIFFERENCE = 1e-4
"""Of the losses of one step, relative."""

Plan = Sequence[Sequence[int]]
"""Lengths of the rows of each microbatch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=96, help="of a step (%(default)s)")
    parser.add_argument("--microbatch", type=int, default=8, help="rows of a padded microbatch (%(default)s)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest row (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="steps of each layout that are measured (%(default)s)")
    parser.add_argument("--planned", type=int, default=4096, help="rows that the algorithms pack (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="see that it runs: fewer rows, a smaller model, one round")
    chosen = parser.parse_args()
    size = SIZE
    if chosen.quick:
        size, chosen.rows, chosen.longest, chosen.rounds, chosen.planned = QUICK, 32, 128, 1, 256
    torch.set_num_threads(chosen.threads)
    print(f"{surroundings('rl-dtensor', 'torch', 'transformers')}; {chosen.device}, {chosen.threads} threads")
    print(f"{size}, float32; medians of {chosen.rounds} steps of each layout, in turn\n")
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = size.write(Path(scratch))
        for kind in LENGTHS:
            lengths = skewed_lengths(kind, chosen.rows, chosen.longest)
            print(f"{kind}: {chosen.rows} rows of {described(lengths)}\n")
            batch = batch_of(lengths, size.vocab)
            print(speeds(folder, batch, chosen.microbatch, chosen.longest, chosen.rounds, chosen.device))
            print(flush=True)
    print(f"Packing {chosen.planned} rows of at most {chosen.longest} tokens into microbatches of {chosen.longest}\n")
    print(fill_rates(chosen.planned, chosen.longest))


def speeds(folder: Path, batch: Batch, microbatch: int, longest: int, rounds: int, device: str) -> str:
    """The table of one kind of lengths."""
    budget = microbatch * longest
    layouts = {
        f"padded, {microbatch} rows": padded(microbatch),
        f"padded by like lengths, {budget} tokens": alike(budget),
        f"packed, {budget} tokens": packed(budget),
    }
    configs = {name: config_of(folder, longest, **settings) for name, settings in layouts.items()}
    taken = in_turn(configs, batch, rounds, device)
    lengths = batch.ragged("tokens").lengths
    num_tokens = int(lengths.sum())
    baseline = median(next(iter(taken.values())))
    rows = []
    for name, config in configs.items():
        plan = Batching.of(config, training=True).plan(batch)
        computed = sum(
            int(lengths[part].sum()) if name.startswith("packed") else len(part) * int(lengths[part].max())
            for part in plan
        )
        took = median(taken[name])
        rows.append(
            (
                name,
                str(len(plan)),
                f"{1 - num_tokens / computed:.0%}",
                seconds(took),
                f"{num_tokens / took:.0f}",
                f"{baseline / took:.2f}x",
            )
        )
    return table(["", "microbatches", "padding", "s", "tokens/s", "of padded"], rows)


def in_turn(configs: Mapping[str, ModelConfig], batch: Batch, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each config's steps; ends where losses differ."""
    taken: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(rounds):
        losses = {}
        for name, config in configs.items():
            with one_rank(config, device) as worker:
                worker.train_step(batch.select(range(min(16, len(batch)))), NextToken())
                started = time.perf_counter()
                losses[name] = worker.train_step(batch, NextToken())["loss"].value
                taken[name].append(time.perf_counter() - started)
        low, high = min(losses.values()), max(losses.values())
        if not high - low <= MAX_DIFFERENCE * abs(high):
            sys.exit(f"losses differ: {losses}")
    return taken


def fill_rates(num_rows: int, budget: int) -> str:
    """The table of packing algorithms: the share of the budgets that tokens fill, and milliseconds of planning.

    Microbatches are as small as they may be, just large enough for the longest row: larger ones are easier to fill.
    """
    algorithms: dict[str, Callable[[Sequence[int], int], Plan]] = {
        "consecutive rows (next fit)": next_fit,
        "first fit": first_fit,
        "first fit, longest first": lambda lengths, budget: first_fit(sorted(lengths, reverse=True), budget),
        "best fit, longest first": best_fit,
        "ours (plan_microbatches)": ours,
    }
    cases = {kind: skewed_lengths(kind, num_rows, budget) for kind in LENGTHS}
    cases["uniform"] = np.random.default_rng(0).integers(budget // 5, budget + 1, num_rows).tolist()
    rows: list[tuple[str, ...]] = []
    for name, algorithm in algorithms.items():
        cells = []
        for lengths in cases.values():
            started = time.perf_counter()
            plan = algorithm(lengths, budget)
            took = time.perf_counter() - started
            assert sorted(length for part in plan for length in part) == sorted(lengths)
            assert all(sum(part) <= budget for part in plan)
            cells += [f"{sum(lengths) / (len(plan) * budget):.2%}", f"{1000 * took:.0f}"]
        rows.append((name, *cells))
    bounds = [f"<= {sum(lengths) / (least_microbatches(lengths, budget) * budget):.2%}" for lengths in cases.values()]
    rows.append(("most that is possible", *(cell for bound in bounds for cell in (bound, ""))))
    return table(["", *(head for kind in cases for head in (f"fill, {kind}", "ms"))], rows)


def least_microbatches(lengths: Sequence[int], budget: int) -> int:
    """A bound from below: by all tokens, and by the rows of which no two fit together."""
    return max(-(-sum(lengths) // budget), sum(2 * length > budget for length in lengths))


def next_fit(lengths: Sequence[int], budget: int) -> Plan:
    """Rows as they come; the next microbatch starts where one does not fit."""
    plan: list[list[int]] = [[]]
    for length in lengths:
        if sum(plan[-1]) + length > budget:
            plan.append([])
        plan[-1].append(length)
    return plan


def first_fit(lengths: Sequence[int], budget: int) -> Plan:
    """Each row into the first microbatch with room."""
    plan: list[list[int]] = []
    free: list[int] = []
    for length in lengths:
        place = next((index for index, room in enumerate(free) if length <= room), len(free))
        if place == len(free):
            plan.append([])
            free.append(budget)
        plan[place].append(length)
        free[place] -= length
    return plan


def best_fit(lengths: Sequence[int], budget: int) -> Plan:
    """Each row, the longest first, into the microbatch with the least room that it fits."""
    plan: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [part for part in plan if sum(part) + length <= budget]
        if not fitting:
            plan.append([length])
        else:
            max(fitting, key=sum).append(length)
    return plan


def ours(lengths: Sequence[int], budget: int) -> Plan:
    """The plan by which the backends train."""
    return [[lengths[row] for row in part] for part in plan_microbatches(lengths, max_tokens=budget)]


def described(lengths: Sequence[int]) -> str:
    """Their range and mean."""
    return f"{min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.0f} in the mean"


if __name__ == "__main__":
    main()
