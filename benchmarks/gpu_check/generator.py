"""The `hf` generator against `transformers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gpu_check.generator_process import complete
from gpu_check.oracle import PlainModel
from gpu_check.report import Report
from gpu_check.setup import Setup
from gpu_check.workers import config_of, num_different, open_worker, packed
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import resolve
from rl_core.rollouts.generation import Generator, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.torch.training.worker import TrainingWorker

PROMPTS = (5, 17, 1, 33)
NUM_NEW = 24
EXACT = 1e-4
"""Bound of the error of logprobs in float32."""
ROUNDED = 5e-2
"""Bound of the mean difference of logprobs between training and generation in bfloat16."""
LEAST_FREED = 0.8


@asynccontextmanager
async def open_generator(setup: Setup, model: ModelConfig) -> AsyncIterator[Generator]:
    """Yield a started generator."""
    from rl_dtensor.generation.plugin import PLUGIN

    generator = resolve(PLUGIN.worker)(GenerationConfig(backend="hf"), PLUGIN.config(), model, Placement(setup.device))
    await generator.start()
    try:
        yield generator
    finally:
        await generator.close()


def check(setup: Setup, report: Report) -> None:
    """Compare exactly in float32 on a small model; measure speed, sleep and agreement with the trainer in bfloat16 on a
    real shape."""
    with report.attempt("float32"):
        asyncio.run(_exact(setup, report))
    with report.attempt("bfloat16"):
        completions = asyncio.run(_rounded(setup, report))
        _mismatch(setup, report, completions)


async def _exact(setup: Setup, report: Report) -> None:
    folder = setup.folder(setup.parity)
    prompts = random_prompts(PROMPTS, setup.parity.vocab)
    async with open_generator(setup, config_of(folder, 128, precision="float32")) as generator:
        greedy = await complete(generator, prompts, SamplingParams(NUM_NEW, temperature=0.0))
        expected = _greedy(folder, prompts, setup)
        differ = sum(num_different(list(ours.token_ids), theirs) for ours, theirs in zip(greedy, expected, strict=True))
        total = NUM_NEW * len(prompts)
        report.holds(
            "greedy tokens, batched", "transformers.generate, one by one", differ == 0, f"{differ} of {total} differ"
        )
        sampled = await complete(generator, prompts, SamplingParams(NUM_NEW))
        rows = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts, sampled, strict=True)]
        oracle = PlainModel(folder, setup.torch_device).logprobs(rows)
        error = max(
            float(np.abs(one.logprobs - theirs[-len(one.token_ids) :]).max())
            for one, theirs in zip(sampled, oracle, strict=True)
        )
        report.within("logprobs of sampled tokens, float32", "transformers, row by row", error, EXACT)
        scores = [await generator.score(row) for row in rows]
        error = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(scores, oracle, strict=True))
        report.within("scores, float32", "transformers, row by row", error, EXACT)


async def _rounded(setup: Setup, report: Report) -> list[tuple[np.ndarray, Completion]]:
    name, shape = next(iter(setup.models.items()))
    num, length = setup.pick(4, 32), setup.pick(8, 128)
    prompts = random_prompts([length] * num, shape.vocab)
    sampling = SamplingParams(setup.pick(8, 128))
    before = setup.accelerator.used_bytes()
    model = config_of(setup.folder(shape, dtype="bfloat16"), length + sampling.max_new_tokens)
    async with open_generator(setup, model) as generator:
        loaded = setup.accelerator.used_bytes() - before
        await complete(generator, prompts[:1], sampling)
        started = time.perf_counter()
        first = await complete(generator, prompts, sampling)
        seconds = time.perf_counter() - started
        count = sum(len(one.token_ids) for one in first)
        report.figures(
            f"{name}, bfloat16, {num} prompts of {length} tokens",
            ("tokens sampled", "s", "tokens/s"),
            [(str(count), f"{seconds:.2f}", f"{count / seconds:.0f}")],
        )
        held = setup.accelerator.used_bytes()
        await generator.pause()
        await generator.sleep()
        freed = held - setup.accelerator.used_bytes(trims=False)
        await generator.wake()
        await generator.resume()
        second = await complete(generator, prompts, sampling)
    changed = sum(num_different(list(a.token_ids), list(b.token_ids)) for a, b in zip(first, second, strict=True))
    report.holds("tokens after sleep and wake", "the same seeds before", changed == 0, f"{changed} of {count} differ")
    if setup.accelerator.measures_memory:
        share = freed / max(1, loaded)
        found = f"{share:.0%} of {loaded / 1e9:.2f} GB (at least {LEAST_FREED:.0%})"
        report.holds("memory freed by sleep", "memory taken by loading", share >= LEAST_FREED, found)
    else:
        report.skip("memory freed by sleep", "host memory is the device's")
    return list(zip(prompts, first, strict=True))


def _mismatch(setup: Setup, report: Report, completions: Sequence[tuple[np.ndarray, Completion]]) -> None:
    from rl_dtensor.plugin import PLUGIN

    shape = next(iter(setup.models.values()))
    length = max(len(prompt) + len(one.token_ids) for prompt, one in completions)
    config = config_of(setup.folder(shape, dtype="bfloat16"), length, **packed(4 * length))
    with open_worker(PLUGIN, config, setup) as worker:
        compare_mismatch(report, worker, completions)


def compare_mismatch(
    report: Report,
    worker: TrainingWorker,
    completions: Sequence[tuple[np.ndarray, Completion]],
    subject: str = "bfloat16",
) -> None:
    """Compare the trainer's logprobs of sampled tokens with the generator's, as every GRPO step logs them.

    Args:
        completions: Prompts and their completions.
        subject: Precision and further words that identify the comparison.
    """
    rows = [np.concatenate([prompt, one.token_ids]).astype(np.int32) for prompt, one in completions]
    found = worker.infer(Batch({"tokens": Ragged.from_rows(rows)}), [LOGPROBS])
    assert found is not None
    differences = np.concatenate(
        [
            np.abs(theirs[-len(one.token_ids) :] - one.logprobs)
            for (_, one), theirs in zip(completions, found.ragged("logprobs"), strict=True)
        ]
    )
    report.within(
        f"trainer and generator, mean |difference|, {subject}", "the trainer's logprobs", differences.mean(), ROUNDED
    )
    report.figures(
        f"Mismatch of trainer and generator, {subject}",
        ("mean", "largest", "mean exp"),
        [(f"{differences.mean():.2g}", f"{differences.max():.2g}", f"{np.exp(differences).mean():.4f}")],
    )


def random_prompts(lengths: Sequence[int], vocab: int) -> list[np.ndarray]:
    """Return the int32 tokens of each prompt."""
    random = np.random.default_rng(0)
    return [random.integers(3, vocab, length).astype(np.int32) for length in lengths]


def _greedy(folder: Path, prompts: Sequence[np.ndarray], setup: Setup) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(setup.torch_device).eval()
    found = []
    for prompt in prompts:
        tokens = torch.as_tensor(prompt.astype(np.int64), device=setup.torch_device)[None]
        made = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(made[0, len(prompt) :].tolist())
    return found
