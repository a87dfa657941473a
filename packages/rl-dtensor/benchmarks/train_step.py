"""Tokens per second of our `train_step` beside a bare PyTorch loop on the same model, rows, loss and optimizer.

    python packages/rl-dtensor/benchmarks/train_step.py [SIZE ...]

The bare loop is what one writes by hand: the model of `transformers` with its own attention, cross-entropy on whole
logits, gradients clipped, `torch.optim.AdamW`. Ours is a whole worker: FSDP2 on one rank, microbatches planned from
rows, logprobs in chunks, loss totals, metrics. Rows are of one length, so that neither pads; both take steps in turn
(A B A B), on the same threads, and their losses must stay the same.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from figures import median, seconds, surroundings, table
from training import ADAMW, NextToken, Size, batch_of, config_of, one_rank, packed, padded
from transformers import AutoModelForCausalLM

from rl_core.data.batch import Batch

MAX_GRAD_NORM = 1.0
MAX_DIFFERENCE = 1e-3
"""Of the losses of one step; rounding grows in AdamW from step to step."""


@dataclass(frozen=True)
class Case:
    """A model, and what one step trains on: rows of one length, so many of them in a microbatch."""

    size: Size
    rows: int
    microbatch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length


CASES = {
    "tiny": Case(Size(128, 5, 4, 2, vocab=128, inner=256, head_dim=32), rows=64, microbatch=32, length=64),
    "small": Case(Size(512, 11, 8, 2, vocab=1024, inner=1024), rows=8, microbatch=4, length=256),
    "vocab": Case(Size(256, 8, 4, 2, vocab=32000, inner=768), rows=8, microbatch=4, length=256),
}
QUICK = Case(Size(64, 2, 2, 1, vocab=256, inner=128, head_dim=32), rows=8, microbatch=4, length=32)

Step = Callable[[], float]
"""Takes one step and returns its loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="SIZE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--steps", type=int, default=8, help="steps of each that are measured (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each before those (%(default)s)")
    parser.add_argument("--chunk", type=int, default=1024, help="our policy.logprob_chunk_size (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="see that it runs: a smaller model, 2 steps after 1")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.cases if name not in CASES]
    if unknown or chosen.steps < 1:
        parser.error(f"unknown size {unknown[0]}" if unknown else "--steps must be at least 1")
    cases = {name: CASES[name] for name in chosen.cases or CASES}
    steps, warm_up = chosen.steps, chosen.warm_up
    if chosen.quick:
        cases, steps, warm_up = {"quick": QUICK}, 2, 1
    torch.set_num_threads(chosen.threads)
    print(f"{surroundings('rl-dtensor', 'torch', 'transformers')}; {chosen.device}, {chosen.threads} threads, float32")
    print(f"medians of {steps} steps of each, in turn, after {warm_up} of warm-up\n")
    for name, case in cases.items():
        print(f"{name}: {case.size}; {case.rows} rows of {case.length} tokens, {case.microbatch} in a microbatch\n")
        print(compared(case, steps, warm_up, chosen.chunk, chosen.device))
        print(flush=True)


def compared(case: Case, steps: int, warm_up: int, chunk: int, device: str) -> str:
    """The table of one case."""
    batch = batch_of([case.length] * case.rows, case.size.vocab)
    layouts = {"packed": packed(case.microbatch * case.length), "padded": padded(case.microbatch)}
    rows = []
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = case.size.write(Path(scratch))
        for layout, settings in layouts.items():
            config = config_of(folder, case.length, logprob_chunk_size=chunk, max_grad_norm=MAX_GRAD_NORM, **settings)
            with one_rank(config, device) as worker:
                taken = in_turn(
                    {
                        "bare loop": bare_loop(folder, batch, case, device),
                        layout: lambda: worker.train_step(batch, NextToken())["loss"].value,
                    },
                    steps,
                    warm_up,
                )
            bare, ours = taken["bare loop"], taken[layout]
            ratio = median(theirs / own for theirs, own in zip(bare, ours, strict=True))
            rows.append(
                (
                    f"ours, {layout}",
                    seconds(median(ours)),
                    seconds(median(bare)),
                    f"{case.tokens / median(ours):.0f}",
                    f"{case.tokens / median(bare):.0f}",
                    f"{ratio:.2f}x",
                )
            )
    return table(["", "s", "bare loop, s", "tokens/s", "bare loop, tokens/s", "ours/bare, in pairs"], rows)


def in_turn(contenders: Mapping[str, Step], steps: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of each one's steps after the warm-up, taken in turn; ends where losses differ."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for step in range(warm_up + steps):
        losses = {}
        for name, take in contenders.items():
            started = time.perf_counter()
            losses[name] = take()
            if step >= warm_up:
                taken[name].append(time.perf_counter() - started)
        low, high = min(losses.values()), max(losses.values())
        if not high - low <= MAX_DIFFERENCE * abs(high):
            sys.exit(f"losses of step {step} differ: {losses}")
    return taken


def bare_loop(folder: Path, batch: Batch, case: Case, device: str) -> Step:
    """A step of the loop that one writes by hand, for rows of one length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW.kwargs)
    tokens = torch.tensor(batch.ragged("tokens").values, device=device).long().view(case.rows, case.length)
    num_targets = case.rows * (case.length - 1)
    model.train()

    def step() -> float:
        total = 0.0
        for rows in tokens.split(case.microbatch):
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


if __name__ == "__main__":
    main()
