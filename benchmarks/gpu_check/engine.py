"""vLLM takes turns with a training worker on one device, as in a colocated run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from gpu_check.generator import LEAST_FREED, compare_mismatch, random_prompts
from gpu_check.generator_process import GeneratorProcess, complete, resume, sleep, wake
from gpu_check.report import Report, logged
from gpu_check.setup import Setup
from gpu_check.transfer import (
    CANARY_BOUND,
    CAPTION,
    HEAD,
    MOST_LEFT,
    compare,
    largest_difference,
    transfer,
    transport_of,
)
from gpu_check.workers import NextToken, batch_of, config_of, num_different, open_worker, packed
from rl_core.model import LOGPROBS
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.plugins import resolve
from rl_core.rollouts.generation import Generator, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.torch.training.worker import TrainingWorker
from rl_core.weights import Transport

MEMORY_SHARE, KV_GIB = 0.3, 0.25
"""The engine's share of a GPU's memory where it is set, and its keys and values on the CPU."""

_started: list[str] = []
"""The choices that the engine of this process made when it started."""


@asynccontextmanager
async def open_engine(setup: Setup, model: ModelConfig) -> AsyncIterator[Generator]:
    """Yield a started replica of vLLM that shares its device."""
    from rl_vllm.engine.arguments import batch_tokens
    from rl_vllm.plugin import PLUGIN

    backend: Any = PLUGIN.config.model_validate({} if setup.accelerator.measures_memory else {"kv_cache_gib": KV_GIB})
    placement = Placement(setup.device, shares_devices=True, awaits_weights=True)
    generator = resolve(PLUGIN.worker)(GenerationConfig(), backend, model, placement)
    with logged("rl_vllm.engine.memory") as messages:
        await generator.start()
    tokens = batch_tokens(backend, placement, model.max_total_sequence_length)
    _started[:] = [*messages, f"at most {tokens} tokens in a forward pass"]
    try:
        yield generator
    finally:
        await generator.close()


async def choices(_: Generator) -> list[str]:
    """Return the choices that the engine made when it started, for `GeneratorProcess.ask`."""
    return _started


def check(setup: Setup, report: Report) -> None:
    """Repeat training, transfer and generation in rounds; each side leaves the device to the other."""
    from rl_dtensor.plugin import PLUGIN

    name, shape = next(iter(setup.models.items()))
    length, num_new = setup.pick(24, 256), setup.pick(8, 128)
    config = config_of(
        setup.folder(shape, dtype="bfloat16"),
        length + num_new,
        logprob_chunk_size=setup.pick(16, 1024),
        **packed(4 * (length + num_new)),
    )
    other = config_of(setup.folder(shape, dtype="bfloat16", seed=1), length + num_new)
    with (
        open_worker(PLUGIN, config, setup) as worker,
        GeneratorProcess(setup, open_engine, other) as engine,
        report.attempt(f"{name}: the engine starts"),
    ):
        worker.offload(("optimizer", "parameters"))
        started, before = time.perf_counter(), setup.accelerator.used_bytes()
        engine.start()
        taken = setup.accelerator.used_bytes() - before
        report.figures(
            "Start of the engine, weights not loaded",
            ("s", "device memory, GB"),
            [(f"{time.perf_counter() - started:.1f}", f"{taken / 1e9:.2f}")],
        )
        report.figures("Chosen at the start", ("",), [(line,) for line in engine.ask(choices)])
        if setup.accelerator.measures_memory:
            free = setup.accelerator.total_bytes() - before
            text = f"{taken / 1e9:.1f} of {free / 1e9:.1f} GB"
            report.holds("memory taken at the start", "more than half of what is free", free / 2 < taken < free, text)
        engine.ask(sleep)
        worker.onload()
        with report.attempt(f"{name}: rounds"):
            _Rounds(setup, report, worker, engine, length, num_new, shape.vocab).run(taken)


class _Rounds:
    """Rounds of a colocated run.

    Args:
        length: Tokens of a prompt, and of a row to train on.
        num_new: Tokens of a completion.
        vocab: Number of tokens of the model.
    """

    def __init__(
        self,
        setup: Setup,
        report: Report,
        worker: TrainingWorker,
        engine: GeneratorProcess,
        length: int,
        num_new: int,
        vocab: int,
    ) -> None:
        self._setup = setup
        self._report = report
        self._worker = worker
        self._engine = engine
        self._batch = batch_of([length] * 4, vocab)
        self._prompts = random_prompts([length] * setup.pick(4, 64), vocab)
        self._sampling = SamplingParams(num_new)
        self._lines: list[tuple[str, ...]] = []
        self._seconds: dict[str, float] = {}

    def run(self, engine_bytes: int) -> None:
        """Run a round, which begins with the worker on the device and the engine asleep.

        Args:
            engine_bytes: Memory that the engine took when it started.
        """
        report, accelerator = self._report, self._setup.accelerator
        transport = transport_of(self._setup, "ipc")
        shown, used, awake, earlier = [], [], [], None
        for version in range(1, self._setup.pick(2, 4) + 1):
            self._seconds = {}
            with self._timed("train"):
                self._worker.train_step(self._batch, NextToken())
            with self._timed("offload, wake"):
                self._worker.offload(("optimizer",))
                self._engine.ask(wake, "weights")
            with self._timed("transfer"):
                self._lines.append(transfer(self._setup, report, self._worker, self._engine, transport, version))
            expected = self._worker.infer(self._batch, [LOGPROBS])
            assert expected is not None
            with self._timed("generate"):
                self._worker.offload(("parameters",))
                self._engine.ask(wake, "kv_cache")
                scores = compare(report, f"ipc, round {version}", expected, self._batch, self._engine)
                self._engine.ask(resume)
                completions = self._engine.ask(complete, self._prompts, self._sampling)
            if earlier is not None:
                moved = largest_difference(scores, earlier)
                report.holds(
                    f"ipc, round {version}: its canary is not that of the version before",
                    "the generator's earlier scores",
                    moved > CANARY_BOUND,
                    f"{moved:.3g} (more than {CANARY_BOUND:.3g})",
                )
            earlier = scores
            # A prompt of its own, so that it is computed alone, and no keys of it are kept.
            alone = self._engine.ask(complete, [self._prompts[0][::-1].copy()], self._sampling)
            awake.append(accelerator.used_bytes())
            with self._timed("sleep, onload"):
                self._engine.ask(sleep)
                freed = awake[-1] - accelerator.used_bytes()
                self._worker.onload()
            used.append(accelerator.used_bytes())
            compare_mismatch(
                report, self._worker, list(zip(self._prompts, completions, strict=True)), f"bfloat16, round {version}"
            )
            shown.append((str(version), *(f"{value:.2f}" for value in self._seconds.values()), f"{freed / 1e9:.2f}"))
        self._compare_awakened(transport, version, alone)
        report.figures(CAPTION, HEAD, self._lines)
        report.figures("Seconds of a round", ("round", *self._seconds, "freed by sleep, GB"), shown)
        if not accelerator.measures_memory:
            report.skip("memory freed by sleep", "host memory is the device's")
            return
        share = f"{freed / engine_bytes:.0%} (at least {LEAST_FREED:.0%})"
        report.holds(
            "memory freed by sleep", "what the engine took at its start", freed >= LEAST_FREED * engine_bytes, share
        )
        for state, sizes in (("asleep", used), ("awake", awake)):
            growth = (max(sizes[1:]) - sizes[1]) / 1e6
            report.within(f"{state}: memory grows, MB", "mem_get_info in the second round", growth, MOST_LEFT / 1e6)

    def _compare_awakened(self, transport: Transport, version: int, expected: list[Completion]) -> None:
        """Give the sleeping engine the weights that it had; it must sample the same tokens from the same seed."""
        self._worker.offload(("optimizer",))
        self._engine.ask(wake, "weights")
        self._lines.append(transfer(self._setup, self._report, self._worker, self._engine, transport, version + 1))
        self._worker.offload(("parameters",))
        self._engine.ask(wake, "kv_cache")
        self._engine.ask(resume)
        found = self._engine.ask(complete, [self._prompts[0][::-1].copy()], self._sampling)
        (ours,), (theirs,) = ([list(one.token_ids) for one in each] for each in (found, expected))
        differ = num_different(ours, theirs)
        self._report.holds(
            "tokens after sleep and waking", "before, same weights and seed", differ == 0, f"{differ} of {len(theirs)}"
        )
        self._engine.ask(sleep)
        self._worker.onload()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._setup.accelerator.synchronize()
        self._seconds[name] = time.perf_counter() - started
