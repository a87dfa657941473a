"""Model FLOPs utilisation of a bfloat16 training step at the shapes of Qwen3-0.6B, 1.7B and 4B with random weights.

    python packages/rl-dtensor/benchmarks/mfu.py --device cuda [MODEL ...]

A step is one packed microbatch of `--tokens`, in rows of 4,096 and of 16,384, through a whole worker on one GPU:
float32 master weights, fused AdamW, logprobs in chunks. What is computed again for lack of memory does not count as
work. Each case runs in a process of its own, with the least recomputation that fits: none, selective, then full.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import median, seconds, surroundings, table
from training import ADAMW, NextToken, Size, batch_of, config_of, in_process, one_rank, packed

from rl_core.metrics import Metric
from rl_core.model_config import OptimizerConfig

VOCAB = 151936
MODELS = {
    "0.6B": Size(1024, 28, 16, 8, vocab=VOCAB, inner=3072, head_dim=128),
    "1.7B": Size(2048, 28, 16, 8, vocab=VOCAB, inner=6144, head_dim=128),
    "4B": Size(2560, 36, 32, 8, vocab=VOCAB, inner=9728, head_dim=128),
}
QUICK = Size(64, 2, 2, 1, vocab=256, inner=128, head_dim=32)
RECOMPUTES: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}
OPTIMIZERS = {
    "float32": OptimizerConfig(name=ADAMW.name, kwargs={**ADAMW.kwargs, "fused": True}),
    "bfloat16": OptimizerConfig(name="rl_core.torch.HalfStateAdamW", kwargs=ADAMW.kwargs),
}
"""By the dtype of their state."""


@dataclass(frozen=True)
class Case:
    """Measurements of one process."""

    folder: Path
    vocab: int
    row: int
    tokens: int
    backend: dict[str, Any]
    optimizer: OptimizerConfig
    chunk: int
    steps: int
    warm_up: int
    device: str


@dataclass(frozen=True)
class Measured:
    """Medians of a case's steps: seconds, operations per second by the model's shape, the share of the GPU's peak where
    that is known; and most bytes held."""

    seconds: float
    flops_per_second: float
    mfu: float | None
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all where none is named")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384], help="tokens of a row (4096 16384)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step, in one microbatch (%(default)s)")
    parser.add_argument("--recompute", choices=["auto", *RECOMPUTES], default="auto", help="the least that fits (auto)")
    parser.add_argument("--state", choices=list(OPTIMIZERS), default="float32", help="of the optimizer (%(default)s)")
    parser.add_argument("--attention", default="auto", help="policy.dtensor_cfg.attention_backend (%(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="policy.logprob_chunk_size (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps measured (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="see that it runs, on a CPU too: a tiny model, 2 steps")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.models if name not in MODELS]
    if unknown or chosen.steps < 1:
        parser.error(f"unknown model {unknown[0]}" if unknown else "--steps must be at least 1")
    if chosen.device == "cpu" and not chosen.quick:
        sys.exit("MFU needs a GPU whose peak is known: use --device cuda, or --quick to see that it runs")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here; --quick runs without one")
    models = {name: MODELS[name] for name in chosen.models or MODELS}
    if chosen.quick:
        models = {"quick": QUICK}
        chosen.rows, chosen.tokens, chosen.chunk, chosen.steps, chosen.warm_up = [64, 256], 256, 64, 2, 1
    if any(chosen.tokens % row for row in chosen.rows):
        parser.error(f"--tokens {chosen.tokens} must be a multiple of each of --rows {chosen.rows}")
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else "cpu"
    print(f"{where}; {surroundings('rl-dtensor', 'torch', 'transformers')}")
    print(
        f"bfloat16, optimizer state {chosen.state}, {chosen.tokens} tokens a step, attention {chosen.attention}, "
        f"logprob chunks of {chosen.chunk}; medians of {chosen.steps} steps after {chosen.warm_up} of warm-up\n"
    )
    rows = [row for name, size in models.items() for row in of_model(name, size, chosen)]
    head = ["", "row, tokens", "recompute", "s", "tokens/s", "TFLOP/s", "MFU", "peak, GB"]
    print(table(head, rows))


def of_model(name: str, size: Size, chosen: argparse.Namespace) -> list[tuple[str, ...]]:
    """Lines of the table."""
    recomputes = list(RECOMPUTES) if chosen.recompute == "auto" else [chosen.recompute]
    label = f"{name} ({size.parameters / 1e9:.2f}B)"
    lines = []
    with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
        folder = size.write(Path(scratch), dtype="bfloat16", max_tokens=max(chosen.rows))
        for row in chosen.rows:
            found = None
            for recompute in recomputes:
                case = Case(
                    folder,
                    size.vocab,
                    row,
                    chosen.tokens,
                    {"attention_backend": chosen.attention, **RECOMPUTES[recompute]},
                    OPTIMIZERS[chosen.state],
                    chosen.chunk,
                    chosen.steps,
                    chosen.warm_up,
                    chosen.device,
                )
                found = in_process(measured_if_it_fits, case)
                if found is not None:
                    break
            lines.append((label, str(row), recompute, *cells(found, chosen.tokens)))
            print(f"{label}, rows of {row}: {'out of memory' if found is None else 'done'}", file=sys.stderr)
    return lines


def cells(found: Measured | None, tokens: int) -> tuple[str, ...]:
    """The cells of a table row for a measurement."""
    if found is None:
        return ("out of memory", "", "", "", "")
    return (
        seconds(found.seconds),
        f"{tokens / found.seconds:.0f}",
        f"{found.flops_per_second / 1e12:.1f}",
        "" if found.mfu is None else f"{found.mfu:.1%}",
        f"{found.peak_bytes / 1e9:.1f}" if found.peak_bytes else "",
    )


def measured_if_it_fits(case: Case) -> Measured | None:
    """None where the GPU's memory does not suffice."""
    try:
        return measured(case)
    except torch.OutOfMemoryError:
        return None


def measured(case: Case) -> Measured:
    """Of one worker's steps.

    Raises:
        torch.OutOfMemoryError: where the GPU's memory does not suffice.
    """
    batch = batch_of([case.row] * (case.tokens // case.row), case.vocab)
    config = config_of(
        case.folder,
        case.tokens,
        precision="bfloat16",
        optimizer=case.optimizer,
        logprob_chunk_size=case.chunk,
        **packed(case.tokens),
    )
    taken: list[float] = []
    metrics: Mapping[str, Metric] = {}
    with one_rank(config, case.device, **case.backend) as worker:
        for _ in range(case.warm_up + case.steps):
            started = time.perf_counter()
            metrics = worker.train_step(batch, NextToken())
            if case.device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        peak_bytes = torch.cuda.max_memory_allocated() if case.device == "cuda" else 0
    took = median(taken[case.warm_up :])
    rate = metrics["flops"].value / took
    peak = metrics["mfu"].weight if "mfu" in metrics else None
    return Measured(took, rate, None if peak is None else rate / peak, peak_bytes)


if __name__ == "__main__":
    main()
