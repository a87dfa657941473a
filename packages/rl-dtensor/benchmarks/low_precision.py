"""Learning curves of float8 against bfloat16, and what rounding to few bits costs with and without training for it.

    python packages/rl-dtensor/benchmarks/low_precision.py [--only float8|formats]

A small random Qwen3 learns rows of a rule: the next token is the sum of the two before it, modulo the vocabulary. Every
variant takes the same steps on the same rows; seeds change model and rows. Float8 is emulated, so the errors are those
of a GPU and the times are not. What rounding costs shows only once a model has learned: those that are compared there
start from one that took three times the steps, and take as many again with a learning rate that falls to 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from figures import surroundings, table
from safetensors.torch import load_file, save_file
from training import NextToken, config_of, one_rank, packed
from transformers import AutoConfig

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model_config import OptimizerConfig, SchedulerConfig
from rl_core.selfcheck.torch.selfcheck import write_random
from rl_core.torch.quantization.formats import rounded, weight_format

VOCAB, LENGTH, ROWS = 31, 24, 24
GROUP = 32
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FORMATS = ("int4", "mxfp4")
TEST_BATCHES = 40
SHOWN = (1, 25, 50, 75, 100)
"""Percentages of the steps whose losses the table has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each variant in float8 (%(default)s)")
    parser.add_argument("--only", choices=("float8", "formats"), help="one of the two parts")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="see that it runs: a few steps of two seeds")
    chosen = parser.parse_args()
    steps, seeds = (8, 2) if chosen.quick else (chosen.steps, chosen.seeds)
    torch.set_num_threads(1)
    print("# Few bits\n")
    print("Made by `packages/rl-dtensor/benchmarks/low_precision.py`. A 2-layer Qwen3 of hidden size 64 learns sums")
    print(f"modulo {VOCAB}. Losses are means over {seeds} seeds, ± standard deviation.\n")
    print(f"{surroundings('torch')}\n")
    with tempfile.TemporaryDirectory() as folder:
        if chosen.only != "formats":
            curves = _train_in_float8(Path(folder), steps, seeds)
            print(f"## Float8\n\nMean loss over the steps before, of {steps}.\n")
            print(table(("precision", *(f"{share} %" for share in SHOWN)), _curve_rows(curves, steps)))
        if chosen.only != "float8":
            losses = _train_for_formats(Path(folder), 3 * steps, seeds)
            print(
                f"\n## Weights of few bits\n\nLoss on {TEST_BATCHES * ROWS} rows that were not trained on. A model "
                f"that has learned for {3 * steps} steps trains for as many more. *exact*: with the weights in "
                "bfloat16. *rounded*: with the weights of linear layers rounded afterwards. *trained for it*: trained "
                "with `qat` in the second half, and served rounded. *share*: of what rounding loses, what training for "
                "it still loses.\n"
            )
            print(table(("format", "exact", "rounded", "trained for it", "share"), _format_rows(losses)))


def _train_in_float8(folder: Path, steps: int, seeds: int) -> dict[str, list[list[float]]]:
    """Losses by step of every precision and seed."""
    variants = {f"float8, {each}": {"float8": {"enabled": True, "emulate": True, "recipe": each}} for each in RECIPES}
    curves: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        source = _write_model(folder / f"float8_{seed}", seed)
        for name, settings in {"bfloat16": {}, **variants}.items():
            curves.setdefault(name, []).append(_train(source, None, steps, seed, settings))
            print(name, seed, f"{curves[name][-1][-1]:.3f}", file=sys.stderr)
    return curves


def _train_for_formats(folder: Path, steps: int, seeds: int) -> dict[str, list[float]]:
    """Losses by name, of every seed, of models that learn for so many steps and then train on in each way."""
    variants: dict[str, dict[str, Any]] = {"int4": {"qat": {"enabled": True, "format": "int4", "group_size": GROUP}}}
    variants["mxfp4"] = {"qat": {"enabled": True, "format": "mxfp4"}}
    losses: dict[str, list[float]] = {}
    for seed in range(seeds):
        learned = folder / f"learned_{seed}"
        _train(_write_model(folder / f"formats_{seed}", seed), learned, steps, seed, {})
        rows = _batches(seed + 1000)
        test = Batch.concat([next(rows) for _ in range(TEST_BATCHES)])
        for name, settings in {"bfloat16": {}, **variants}.items():
            curve = _train(learned, folder / f"{name}_{seed}", steps, seed + 500, settings, lr_falls=True)
            print(name, seed, f"{curve[-1]:.3f}", file=sys.stderr)
        plain = folder / f"bfloat16_{seed}"
        losses.setdefault("exact", []).append(_loss(plain, test))
        for name in FORMATS:
            losses.setdefault(f"{name} aware", []).append(_loss(_rounded(folder / f"{name}_{seed}", name), test))
            losses.setdefault(f"{name} rounded", []).append(_loss(_rounded(plain, name), test))
    return losses


def _write_model(folder: Path, seed: int) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCAB, "max_position_embeddings": 64}
    return write_random(AutoConfig.for_model("qwen3", **heads, **sizes), folder, seed)


def _batches(seed: int) -> Iterator[Batch]:
    """Rows in which every token is the sum of the two before it."""
    random = np.random.default_rng(seed)
    while True:
        rows = random.integers(0, VOCAB, (ROWS, LENGTH))
        for place in range(2, LENGTH):
            rows[:, place] = (rows[:, place - 1] + rows[:, place - 2]) % VOCAB
        yield Batch({"tokens": Ragged.from_rows(list(rows), dtype=np.int32)})


def _config(source: Path, schedule: Sequence[SchedulerConfig] = ()) -> Any:
    optimizer = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 3e-3, "weight_decay": 0.0})
    return config_of(
        source, LENGTH, precision="bfloat16", optimizer=optimizer, scheduler=list(schedule), **packed(ROWS * LENGTH)
    )


def _train(
    source: Path, target: Path | None, steps: int, seed: int, settings: Mapping[str, Any], *, lr_falls: bool = False
) -> list[float]:
    """Losses by step; the trained model is exported if it has a folder."""
    batches = _batches(seed)
    falling = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": steps}
    schedule = [SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs=falling)] if lr_falls else []
    with one_rank(_config(source, schedule), **settings) as worker:
        losses = [worker.train_step(next(batches), NextToken())["loss"].result() for _ in range(steps)]
        if target is not None:
            worker.export(str(target))
    return losses


def _loss(source: Path, batch: Batch) -> float:
    with one_rank(_config(source)) as worker:
        return worker.evaluate(batch, NextToken())["loss"].result()


def _rounded(source: Path, name: str) -> Path:
    """The same model with the weights of its linear layers rounded to a format."""
    fmt, target = weight_format(name, GROUP), source.with_name(f"{source.name}_{name}_rounded")
    tensors = load_file(source / "model.safetensors")
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    served = {
        each: rounded(tensor.bfloat16(), fmt) if tensor.ndim == 2 and ".layers." in each else tensor
        for each, tensor in tensors.items()
    }
    save_file(served, target / "model.safetensors", {"format": "pt"})
    return target


def _curve_rows(curves: Mapping[str, list[list[float]]], steps: int) -> Iterator[tuple[str, ...]]:
    ends = [max(1, steps * share // 100) for share in SHOWN]
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    for name, by_seed in curves.items():
        yield name, *(_spread([mean(curve[start:end]) for curve in by_seed]) for start, end in spans)


def _format_rows(losses: Mapping[str, list[float]]) -> Iterator[tuple[str, ...]]:
    exact = losses["exact"]
    for name in FORMATS:
        plain, aware = losses[f"{name} rounded"], losses[f"{name} aware"]
        lost = mean(plain) - mean(exact)
        share = f"{100 * (mean(aware) - mean(exact)) / lost:.0f} %" if lost > 0 else "-"
        yield name, _spread(exact), _spread(plain), _spread(aware), share


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


if __name__ == "__main__":
    main()
