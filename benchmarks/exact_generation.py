"""Steps with `policy.generation.exact` and without it, in pairs: processor seconds of sampling, of the pass for the
logprobs before the update and of the update, and the largest difference between trainer and generator.

    python benchmarks/exact_generation.py [tiny] [small]

Both sides of a pair sample the same prompts with the `hf` generator, read the logprobs of what they sampled and take a
step on one `dtensor` rank, in float32 on one thread; which side begins alternates. The learning rate is 0, so all pairs
have the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch
from measurement import ModelSize, make_endless_model, num_parameters, seconds, surroundings, table

from rl_algos.losses.policy import PolicyLoss
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import GenerationConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import Rank, RankPool, preload
from rl_dtensor.config import DTensorConfig
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig
from rl_dtensor.worker import DTensorWorker

PHASES = ("sampling", "logprobs", "update")


@dataclass(frozen=True)
class Size:
    """A model, the rows of a step, and the tokens of their prompts and completions."""

    model: ModelSize
    rows: int
    prompt: int
    tokens: int


SIZES = {
    "tiny": Size(ModelSize(128, 5, 4, 2), rows=32, prompt=24, tokens=32),
    "small": Size(ModelSize(512, 11, 8, 2), rows=16, prompt=64, tokens=64),
}


def build(config: ModelConfig, spec: ModelSpec, rendezvous: object) -> DTensorWorker:
    return DTensorWorker(config, DTensorConfig(), spec, rendezvous)


def spent(rank: Rank) -> float:
    """Return the processor seconds of the rank's process."""
    return time.process_time()


@dataclass
class Side:
    """Steps with or without exact generation, and their seconds."""

    folder: Path
    size: Size
    exact: bool
    taken: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    largest: float = 0.0

    def __enter__(self) -> Side:
        size = self.size
        longest = size.prompt + size.tokens
        config = ModelConfig(
            model_name=str(self.folder),
            precision="float32",
            max_total_sequence_length=longest,
            sequence_packing=SequencePackingConfig(
                enabled=True, train_mb_tokens=8 * longest, logprob_mb_tokens=8 * longest
            ),
            optimizer=OptimizerConfig(kwargs={"lr": 0.0, "weight_decay": 0.0}),
        )
        self._runner = asyncio.Runner()
        generation = GenerationConfig(backend="hf", exact=self.exact)
        self._generator = HFGenerator(generation, HFConfig(max_batch_size=size.rows), config, Placement("cpu"))
        self._runner.run(self._generator.start())
        self._pool = RankPool(1)
        self._model = PooledModel(self._pool, "exact_generation:build", config, ModelSpec(exact=self.exact), 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.close()
        self._pool.close()
        self._runner.run(self._generator.close())
        self._runner.close()

    def step(self, number: int) -> None:
        size, draws = self.size, np.random.default_rng(number)
        requests = [
            GenerationRequest(draws.integers(3, 60, size.prompt).astype(np.int32), SamplingParams(size.tokens), seed)
            for seed in range(size.rows)
        ]

        async def sample() -> Sequence[Completion]:
            return await asyncio.gather(*[self._generator.generate(request) for request in requests])

        began = time.process_time()
        made = self._runner.run(sample())
        times = [time.process_time() - began]
        pairs = list(zip(requests, made, strict=True))
        tokens = Ragged.from_rows([np.concatenate([r.token_ids, c.token_ids]) for r, c in pairs], np.int32)
        generated = [np.concatenate([np.zeros(len(r.token_ids)), c.logprobs]) for r, c in pairs]
        mask = [np.concatenate([np.zeros(len(r.token_ids)), np.ones(len(c.token_ids))]) for r, c in pairs]
        batch = Batch(
            {
                "tokens": tokens,
                "loss_mask": Ragged.from_rows(mask, np.uint8),
                "generation_logprobs": Ragged.from_rows(generated, np.float32),
                "advantages": draws.normal(size=size.rows).astype(np.float32),
            }
        )
        before = self._spent()
        prev = self._model.infer(batch, [LOGPROBS]).ragged("logprobs")
        times.append(self._spent() - before)
        is_sampled = batch.ragged("loss_mask").values > 0
        off = np.abs(prev.values - batch.ragged("generation_logprobs").values)[is_sampled]
        self.largest = max(self.largest, float(off.max()))
        before = self._spent()
        self._model.train_step(batch.with_columns({"prev_logprobs": prev}), PolicyLoss())
        times.append(self._spent() - before)
        for phase, value in zip(PHASES, times, strict=True):
            self.taken[phase].append(value)

    def _spent(self) -> float:
        (found,) = self._pool.run(spent, [()])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", choices=[*SIZES, []], help="sizes (default: all)")
    parser.add_argument("--pairs", type=int, default=8, help="pairs measured, after one of warm-up (%(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    preload("rl_dtensor.worker")
    print(surroundings("rl-core", "rl-dtensor", "torch"))
    for name in chosen.sizes or SIZES:
        with tempfile.TemporaryDirectory(prefix="rl-benchmark-") as scratch:
            compare(name, SIZES[name], chosen.pairs, Path(scratch))


def compare(name: str, size: Size, pairs: int, folder: Path) -> None:
    make_endless_model(folder, size.model)
    with Side(folder, size, exact=True) as exact, Side(folder, size, exact=False) as plain:
        for number in range(pairs + 1):
            for side in (exact, plain) if number % 2 else (plain, exact):
                side.step(number)
    rows = []
    for phase in (*PHASES, "step"):
        ours, theirs = ([sum(step) for step in zip(*_parts(side, phase), strict=True)] for side in (exact, plain))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ends = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append((phase, seconds(median(ours)), seconds(median(theirs)), f"{median(ratios):.2f}", ends))
    print(
        f"\n{name}: {num_parameters(folder) / 1e6:.1f}M parameters, {size.rows} rows of {size.prompt} + {size.tokens} "
        f"tokens, {pairs} pairs; medians of processor seconds\n"
    )
    print(table(["", "exact, s", "usual, s", "ratio", "of the pairs"], rows))
    print(f"\nlargest difference of logprobs: {exact.largest:.2g} exact, {plain.largest:.2g} usual")


def _parts(side: Side, phase: str) -> list[list[float]]:
    """Return the seconds of the measured steps in a phase, or in all phases."""
    return [side.taken[each][1:] for each in (PHASES if phase == "step" else (phase,))]


if __name__ == "__main__":
    main()
