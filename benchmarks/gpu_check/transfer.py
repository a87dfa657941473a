"""Weights from a training worker to a generator in another process, by each transport."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from gpu_check.generator import open_generator
from gpu_check.generator_process import GeneratorProcess, begin, receive, resume, score
from gpu_check.report import Report, Skip
from gpu_check.setup import Setup
from gpu_check.workers import NextToken, batch_of, config_of, open_worker, packed
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.selfcheck.rank_pool import free_port
from rl_core.weights import Transport, TransportKind, num_bytes

MOST_LEFT = 64 * 2**20
"""Bytes of device memory that a round may leave in use."""
CANARY_BOUND = 5e-2
"""Bound of the difference of logprobs, whose rounding in half precision differs between the two engines."""
TRANSFER_S = 60.0
CAPTION, HEAD = "Transfers, digests at both ends included", ("transport", "round", "MB", "s", "GB/s")
"""Of the figures of `transfer`."""


def check(setup: Setup, report: Report) -> None:
    """Transfer a few times by each transport, with a training step before each."""
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
    with open_worker(PLUGIN, config, setup) as worker, GeneratorProcess(setup, open_generator, other) as generator:
        for kind in get_args(TransportKind):
            with report.attempt(f"{name}, {kind}"):
                if kind == "collective" and setup.kind.collectives == "nccl":
                    raise Skip("NCCL needs a GPU for each of the two processes")
                rows += _rounds(setup, report, worker, kind, batch, generator)
    report.figures(CAPTION, HEAD, rows)
    if setup.accelerator.measures_memory:
        left = (setup.accelerator.used_bytes() - before) / 1e6
        report.within("memory left in use, MB", "mem_get_info before the worker", left, MOST_LEFT / 1e6)


def _rounds(
    setup: Setup, report: Report, worker: Any, kind: TransportKind, batch: Batch, generator: GeneratorProcess
) -> list[tuple[str, ...]]:
    """Return lines of figures; the generator starts with weights that differ from the worker's."""
    lines, used = [], []
    transport = transport_of(setup, kind)
    for version in range(1, setup.pick(2, 4) + 1):
        worker.train_step(batch, NextToken())
        lines.append(transfer(setup, report, worker, generator, transport, version))
        used.append(setup.accelerator.used_bytes())
        generator.ask(resume)
        expected = worker.infer(batch, [LOGPROBS])
        compare(report, f"{kind}, round {version}", expected, batch, generator)
    if setup.accelerator.measures_memory:
        growth = (max(used[1:]) - used[1]) / 1e6
        report.within(f"{kind}: memory grows, MB", "mem_get_info in the second round", growth, MOST_LEFT / 1e6)
    else:
        report.skip(f"{kind}: memory", "host memory is the device's")
    return lines


def transport_of(setup: Setup, kind: TransportKind) -> Transport:
    """Return a transport from the worker to one generator."""
    address = str(setup.workspace / "sync") if kind == "disk" else f"127.0.0.1:{free_port()}"
    every_rank_sends = setup.kind.has_gpus and kind == "ipc"
    return Transport(kind, address, 1, setup.kind.bucket_bytes, TRANSFER_S, every_rank_sends=every_rank_sends)


def transfer(
    setup: Setup, report: Report, worker: Any, generator: GeneratorProcess, transport: Transport, version: int
) -> tuple[str, ...]:
    """Send a version of the weights, whose digest must arrive; returns a line of figures.

    The generator starts with weights that differ from the worker's, and is left paused.
    """
    setup.accelerator.synchronize()
    manifest = worker.manifest(version)
    generator.ask(begin, manifest)
    generator.tell(receive, transport, version)
    started = time.perf_counter()
    (sent,) = worker.send(manifest, transport)
    seconds = time.perf_counter() - started
    received = generator.answer()
    subject = f"{transport.kind}, round {version}: digest"
    report.holds(subject, "the sender's", received == sent, f"{received}, sent {sent}")
    size = sum(num_bytes(spec) for spec in manifest.tensors)
    expected = setup.chip and setup.chip.synced_bytes / 1e9 if transport.kind == "ipc" else None
    subject, basis = f"transfer by {transport.kind}, round {version}", "16 GB in a third of a second"
    report.speed(subject, "GB/s", size / seconds / 1e9, expected, basis if expected else "")
    return transport.kind, str(version), f"{size / 1e6:.1f}", f"{seconds:.3f}", f"{size / seconds / 1e9:.2f}"


def compare(
    report: Report, subject: str, expected: Batch, batch: Batch, generator: GeneratorProcess
) -> list[np.ndarray]:
    """Compare the logprobs of rows with those that the worker has computed; returns the generator's."""
    found = generator.ask(score, [np.asarray(row) for row in batch.ragged("tokens")])
    error = largest_difference(found, list(expected.ragged("logprobs")))
    report.within(f"{subject}: canary's logprobs", "the worker's own", error, CANARY_BOUND)
    return found


def largest_difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Return the largest difference of any token's logprob."""
    return max(float(np.abs(ours - theirs).max()) for ours, theirs in zip(found, expected, strict=True))
