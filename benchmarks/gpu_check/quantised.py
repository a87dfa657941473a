"""vLLM with weights in 8 bits, which it takes from a training worker and quantises again for every version."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from gpu_check.engine import KV_GIB, MEMORY_SHARE
from gpu_check.generator import random_prompts
from gpu_check.generator_process import GeneratorProcess, complete, resume, score
from gpu_check.report import Report, Skip
from gpu_check.setup import Setup
from gpu_check.transfer import CANARY_BOUND, transfer, transport_of
from gpu_check.workers import NextToken, batch_of, config_of, open_worker, packed
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import resolve
from rl_core.rollouts.delivery import noise_of
from rl_core.rollouts.generation import Generator, Placement, SamplingParams
from rl_core.torch.training.worker import TrainingWorker

METHODS = ("fp8_per_channel", "fp8_per_block", "fp8_per_tensor")
PLAIN = "none"


@asynccontextmanager
async def open_quantised(setup: Setup, model: ModelConfig, method: str) -> AsyncIterator[Generator]:
    """Yield a started replica of vLLM whose weights are quantised by a method, except the last layer's."""
    from rl_vllm.plugin import PLUGIN

    on_gpu = setup.accelerator.measures_memory
    room = {"gpu_memory_utilization": MEMORY_SHARE} if on_gpu else {"kv_cache_gib": KV_GIB}
    quantization = None if method == PLAIN else {"method": method, "oracle_every": 1, "num_last_layers_in_bf16": 1}
    backend = PLUGIN.config.model_validate({**room, "quantization": quantization})
    generator = resolve(PLUGIN.worker)(GenerationConfig(), backend, model, Placement(setup.device, awaits_weights=True))
    await generator.start()
    try:
        yield generator
    finally:
        await generator.close()


async def noise(generator: Generator) -> float:
    """Return the noise that the generator measured on the weights that it took last."""
    return noise_of(await generator.health())


def check(setup: Setup, report: Report) -> None:
    """Sync several versions with every method that this device has kernels for, next to the same engine in bfloat16."""
    from rl_dtensor.plugin import PLUGIN
    from rl_vllm.config import QuantizationConfig
    from rl_vllm.engine.quantisation_kernels import quantisation_problems

    name, shape = next(iter(setup.models.items()))
    length, num_new = setup.pick(24, 256), setup.pick(8, 128)
    rows = packed(4 * (length + num_new))
    config = config_of(setup.folder(shape, dtype="bfloat16"), length + num_new, **rows)
    other = config_of(setup.folder(shape, dtype="bfloat16", seed=1), length + num_new)
    prompts = random_prompts([length] * setup.pick(2, 64), shape.vocab)
    lines: list[tuple[str, ...]] = []
    with open_worker(PLUGIN, config, setup) as worker:
        for method in (*METHODS, PLAIN):
            with report.attempt(f"{name}, {method}"):
                if method != PLAIN:
                    problems = quantisation_problems(QuantizationConfig(method=method), "auto")
                    if problems:
                        raise Skip(problems[0])
                with GeneratorProcess(setup, partial(open_quantised, method=method), other) as engine:
                    batch = batch_of([length] * 4, shape.vocab)
                    lines += _versions(setup, report, worker, engine, method, batch)
                    lines[-1] = (*lines[-1], _speed(engine, prompts, SamplingParams(num_new)))
    head = ("weights", "version", "noise", "mean |difference|", "seconds of the sync", "tokens/s")
    report.figures("Versions that an engine quantised", head, [(*line, "")[: len(head)] for line in lines])


def _versions(
    setup: Setup, report: Report, worker: TrainingWorker, engine: GeneratorProcess, method: str, batch: Batch
) -> list[tuple[str, ...]]:
    """Train, send and compare; an engine that does not hold what its recipe gives raises."""
    transport, lines = transport_of(setup, "ipc"), []
    for version in range(1, setup.pick(2, 4) + 1):
        worker.train_step(batch, NextToken())
        _, _, _, seconds, _ = transfer(setup, report, worker, engine, transport, version)
        engine.ask(resume)
        expected = worker.infer(batch, [LOGPROBS])
        assert expected is not None
        wanted = list(expected.ragged("logprobs"))
        found = engine.ask(score, [np.asarray(row) for row in batch.ragged("tokens")])
        difference = float(np.mean([np.abs(ours - theirs).mean() for ours, theirs in zip(found, wanted, strict=True)]))
        measured = engine.ask(noise)
        spread = float(np.concatenate([row[1:] for row in wanted]).std())
        subject = f"{method}, version {version}: mean |difference| of logprobs"
        report.within(subject, "the worker's own", difference, CANARY_BOUND + measured * spread)
        lines.append((method, str(version), f"{measured:.3g}", f"{difference:.3g}", seconds))
    return lines


def _speed(engine: GeneratorProcess, prompts: list[np.ndarray], sampling: SamplingParams) -> str:
    engine.ask(complete, prompts[:1], sampling)
    started = time.perf_counter()
    completions = engine.ask(complete, prompts, sampling)
    return f"{sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started):.0f}"
