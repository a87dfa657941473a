"""Weights from a training worker to a generator in another process, by each transport."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, get_args

import numpy as np

from gpu_check.generator import open_generator
from gpu_check.report import Report, Skip
from gpu_check.setup import Setup
from gpu_check.workers import NextToken, batch_of, config_of, open_worker, packed
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.rank_pool import free_port
from rl_core.weights import Manifest, Transport, TransportKind, num_bytes

MOST_LEFT = 64 * 2**20
"""Bytes of device memory that a round may leave in use."""
CANARY_BOUND = 5e-2
"""Bound of the difference of logprobs, whose rounding in half precision differs between the two engines."""
ANSWER_S, TRANSFER_S = 100.0, 60.0


@dataclass(frozen=True)
class Received:
    """The generator's answer to one transfer: the digest as received, logprobs of the canary rows."""

    digest: str
    logprobs: list[np.ndarray]


def check(setup: Setup, report: Report) -> None:
    """A few rounds by each transport, with a training step before each."""
    from rl_dtensor.plugin import PLUGIN

    name, shape = next(iter(setup.models.items()))
    length = setup.pick(24, 256)
    batch = batch_of([length] * 4, shape.vocab)
    config = config_of(
        setup.folder(shape, dtype="bfloat16"), length, logprob_chunk_size=setup.pick(16, 1024), **packed(4 * length)
    )
    other = config_of(setup.folder(shape, dtype="bfloat16", seed=1), length)
    before = setup.accelerator.used_bytes()
    rows: list[tuple[str, ...]] = []
    with open_worker(PLUGIN, config, setup) as worker, GeneratorProcess(setup, other) as generator:
        for kind in get_args(TransportKind):
            with report.attempt(f"{name}, {kind}"):
                if kind == "collective" and setup.kind.collectives == "nccl":
                    raise Skip("NCCL needs a GPU for each of the two processes")
                rows += _rounds(setup, report, worker, kind, batch, generator)
    report.figures("Transfers, digests at both ends included", ("transport", "round", "MB", "s", "GB/s"), rows)
    if setup.accelerator.measures_memory:
        left = (setup.accelerator.used_bytes() - before) / 1e6
        report.within("memory left in use, MB", "mem_get_info before the worker", left, MOST_LEFT / 1e6)


class GeneratorProcess:
    """A process with a generator, started when it is first asked, and again after it has failed."""

    def __init__(self, setup: Setup, model: ModelConfig) -> None:
        self._setup = setup
        self._model = model
        self._context = multiprocessing.get_context("spawn")
        self._process: BaseProcess | None = None

    def __enter__(self) -> GeneratorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._pipe.close()  # at which it closes the generator and ends
            self._process.join(ANSWER_S)
            self._end()

    def start(self) -> None:
        """Start the process, with its generator loaded, if it is not running."""
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(
                target=_generate, args=(theirs, self._setup, self._model), daemon=True
            )
            self._process.start()
            theirs.close()
            self.answer()

    def tell(self, task: Any) -> None:
        """Send it a transfer to receive."""
        self._pipe.send(task)

    def answer(self) -> Any:
        """Its next answer.

        Raises:
            RuntimeError: if it failed, with its traceback.
        """
        answer: Any = f"no answer within {ANSWER_S:.0f} s"
        if self._pipe.poll(ANSWER_S):
            try:
                answer = self._pipe.recv()
            except EOFError:
                answer = "it ended without a message"
        if isinstance(answer, str):
            self._end()
            raise RuntimeError(f"in the generator's process: {answer}")
        return answer

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


def _rounds(
    setup: Setup, report: Report, worker: Any, kind: TransportKind, batch: Batch, generator: GeneratorProcess
) -> list[tuple[str, ...]]:
    """Lines of figures; the generator starts with weights that differ from the worker's."""
    lines, used = [], []
    address = str(setup.workspace / "sync") if kind == "disk" else f"127.0.0.1:{free_port()}"
    transport = Transport(
        kind, address, 1, setup.kind.bucket_bytes, TRANSFER_S, every_rank_sends=setup.kind.has_gpus and kind == "ipc"
    )
    generator.start()
    for version in range(1, setup.pick(2, 4) + 1):
        worker.train_step(batch, NextToken())
        setup.accelerator.synchronize()
        manifest = worker.manifest(version)
        sent, received, seconds = _transfer(worker, manifest, transport, generator, batch)
        size = sum(num_bytes(spec) for spec in manifest.tensors)
        lines.append((kind, str(version), f"{size / 1e6:.1f}", f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}"))
        used.append(setup.accelerator.used_bytes())
        _compare(report, f"{kind}, round {version}", worker, batch, sent, received)
    if setup.accelerator.measures_memory:
        growth = (max(used[1:]) - used[1]) / 1e6
        report.within(f"{kind}: memory grows, MB", "mem_get_info in the second round", growth, MOST_LEFT / 1e6)
    else:
        report.skip(f"{kind}: memory", "host memory is the device's")
    return lines


def _transfer(
    worker: Any, manifest: Manifest, transport: Transport, generator: GeneratorProcess, batch: Batch
) -> tuple[str, Received, float]:
    generator.tell((manifest, transport, [np.asarray(row) for row in batch.ragged("tokens")]))
    generator.answer()  # it has begun
    started = time.perf_counter()
    (sent,) = worker.send(manifest, transport)
    seconds = time.perf_counter() - started
    return sent, generator.answer(), seconds


def _compare(report: Report, subject: str, worker: Any, batch: Batch, sent: str, received: Received) -> None:
    report.holds(f"{subject}: digest", "the sender's", received.digest == sent, f"{received.digest}, sent {sent}")
    expected = worker.infer(batch, [LOGPROBS]).ragged("logprobs")
    error = max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(received.logprobs, expected, strict=True))
    report.within(f"{subject}: canary's logprobs", "the worker's own", error, CANARY_BOUND)


def _generate(pipe: Connection, setup: Setup, model: ModelConfig) -> None:
    """The other process."""
    try:
        asyncio.run(_adopt(pipe, setup, model))
    except Exception:  # noqa: BLE001  # becomes the other process's error
        pipe.send(traceback.format_exc())


async def _adopt(pipe: Connection, setup: Setup, model: ModelConfig) -> None:
    async with open_generator(setup, model) as generator:
        pipe.send(True)
        while True:
            try:
                manifest, transport, rows = pipe.recv()
            except EOFError:
                return
            await generator.pause()
            await generator.begin(manifest)
            pipe.send(True)
            digest = (await generator.receive(transport, 1))[0]
            await generator.commit(manifest.version)
            await generator.resume()
            logprobs = [await generator.score(row) for row in rows]
            setup.accelerator.release()
            pipe.send(Received(digest, logprobs))
