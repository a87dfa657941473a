"""Training steps of a whole worker: exact on a small model, then speed and memory on real shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from gpu_check.oracle import PlainModel, relative
from gpu_check.report import Report, Skip
from gpu_check.setup import Setup, Shape
from gpu_check.workers import SGD, NextToken, batch_of, config_of, numbers, open_worker, packed, padded
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.plugins import BackendPlugin
from rl_core.torch.training.flops import peak_flops
from rl_core.torch.training.worker import TrainingWorker

ORACLE = "transformers in float32, row by row"
LENGTHS = (9, 3, 64, 1, 33, 2, 17)
NUM_STEPS = 3
BOUNDS = {"float32": (2e-5, 2e-4), "bfloat16": (1e-2, 5e-2)}
"""Bounds of the relative error of the loss and of the gradient's norm, over the steps."""
LOGPROB_BOUND = 3e-2
"""Bound of the mean difference of a token's logprob in bfloat16."""
LAYOUTS: Mapping[str, dict[str, Any]] = {"packed": packed(80), "padded": padded(3)}
"""Layouts of rows; each splits the parity batch into several microbatches."""


@dataclass(frozen=True)
class Case:
    """A kind of step.

    Args:
        layout: Layout of rows.
        settings: Settings of the backend that are not its defaults.
    """

    layout: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join([self.layout, *(f"{name} {str(value).lower()}" for name, value in self.settings.items())])


StepSeconds = Callable[..., float]
"""`gpu_check.expected_step.step_seconds`."""

CASES = (
    Case("packed", {"recompute": "none"}),
    Case("packed", {"recompute": "none", "fused_kernels": False}),
    Case("packed", {"recompute": "none", "compile": True}),
    Case("packed", {"recompute": "selective"}),
    Case("packed", {"recompute": "full"}),
    Case("padded", {"recompute": "full"}),
)


def check(setup: Setup, report: Report) -> None:
    """rl-dtensor's worker."""
    from gpu_check.expected_step import step_seconds
    from rl_dtensor.plugin import PLUGIN

    check_parity(PLUGIN, setup, report)
    check_shapes(PLUGIN, setup, report, CASES, step_seconds=step_seconds)


def check_parity(plugin: BackendPlugin, setup: Setup, report: Report, kind: str = "", **backend: Any) -> None:
    """Losses and gradient norms of a few steps of a small model, in both precisions and layouts.

    Args:
        kind: Kind of the backend's layers, for the report.
    """
    folder = setup.folder(setup.parity)
    batch = batch_of(LENGTHS, setup.parity.vocab)
    oracle = PlainModel(folder, setup.torch_device, SGD)
    expected = [oracle.step(batch) for _ in range(NUM_STEPS)]
    for precision, bounds in BOUNDS.items():
        for layout, settings in LAYOUTS.items():
            subject = f"{kind}{precision}, {layout}"
            with report.attempt(subject):
                config = config_of(
                    folder,
                    128,
                    precision=precision,
                    optimizer=SGD,
                    max_grad_norm=None,
                    logprob_chunk_size=32,
                    **settings,
                )
                with open_worker(plugin, config, setup, **backend) as worker:
                    found = [numbers(worker.train_step(batch, NextToken())) for _ in range(NUM_STEPS)]
                for name, bound in zip(("loss", "grad_norm"), bounds, strict=True):
                    error = max(
                        relative(ours[name], getattr(theirs, name))
                        for ours, theirs in zip(found, expected, strict=True)
                    )
                    report.within(f"{subject}: {name} over {NUM_STEPS} steps", ORACLE, error, bound)


def check_shapes(
    plugin: BackendPlugin,
    setup: Setup,
    report: Report,
    cases: tuple[Case, ...],
    kind: str = "",
    step_seconds: StepSeconds | None = None,
) -> None:
    """Loss, speed and memory of real shapes, or of a tiny one if the setup is small.

    Args:
        kind: Kind of the backend's layers, for the report.
        step_seconds: Expected seconds of a packed step of the backend, as `gpu_check.expected_step` counts them.
    """
    rows: list[tuple[str, ...]] = []
    for name, shape in setup.models.items():
        batch = batch_of(list(_lengths(setup)), shape.vocab)
        with report.attempt(f"{kind}{name}: the oracle's loss"):
            oracle = PlainModel(setup.folder(shape, dtype="bfloat16"), setup.torch_device)
            logprobs = oracle.logprobs(list(batch.ragged("tokens")))
            del oracle
            setup.accelerator.release()
            expected = np.concatenate(logprobs)
            for case in cases:
                subject = f"{kind}{name}, {case}"
                with report.attempt(subject):
                    try:
                        found, speed = _measured(plugin, setup, report, subject, shape, batch, case, expected)
                        rows.append((subject, *found))
                        _expect(setup, report, subject, shape, batch, case, speed, step_seconds)
                    except torch.OutOfMemoryError:
                        raise Skip("out of memory") from None
    report.figures(
        f"Steps of {setup.pick(256, 8192)} tokens, bfloat16, float32 master weights, AdamW",
        ("", "tokens/s", "TFLOP/s", "MFU", "peak, GB", "loss, first to last"),
        rows,
    )


def _lengths(setup: Setup) -> Iterator[int]:
    """Rows of mixed lengths, 8192 tokens together; short enough for the oracle's scores."""
    scale = setup.pick(1, 32)
    for length in (64, 32, 48, 64, 16, 24, 7, 1):
        yield length * scale


def _measured(
    plugin: BackendPlugin,
    setup: Setup,
    report: Report,
    subject: str,
    shape: Shape,
    batch: Batch,
    case: Case,
    expected: np.ndarray,
) -> tuple[tuple[str, ...], float]:
    """A line of figures, and tokens per second; the loss is compared with the oracle's, and must fall on a repeated
    batch."""
    lengths = batch.ragged("tokens").lengths
    num_tokens = int(lengths.sum())
    layout = packed(num_tokens) if case.layout == "packed" else padded(len(lengths))
    config = config_of(
        setup.folder(shape, dtype="bfloat16"), int(lengths.max()), logprob_chunk_size=_chunk_size(setup), **layout
    )
    with open_worker(plugin, config, setup, **case.settings) as worker:
        read = worker.infer(batch, [LOGPROBS])
        assert read is not None
        differences = np.abs(read.ragged("logprobs").values - expected)
        setup.accelerator.restart_peak()
        steps = [_timed_step(worker, setup, batch) for _ in range(5)]
        peak_bytes = setup.accelerator.peak_bytes()
    losses = [step["loss"] for step, _ in steps]
    took = median(seconds for _, seconds in steps[2:])
    report.within(f"{subject}: logprobs, mean difference", ORACLE, float(differences.mean()), LOGPROB_BOUND)
    loss = -float(expected.sum()) / float((lengths - 1).sum())
    report.within(f"{subject}: first loss", ORACLE, relative(losses[0], loss), BOUNDS["bfloat16"][0])
    falls = losses[-1] < losses[0]
    report.holds(f"{subject}: the loss falls", "a repeated batch", falls, f"{losses[0]:.3f} to {losses[-1]:.3f}")
    rate = shape.model.training_flops(lengths) / took
    line = (
        f"{num_tokens / took:.0f}",
        f"{rate / 1e12:.2f}",
        _share_of_peak(setup, rate),
        f"{peak_bytes / 1e9:.1f}",
        f"{losses[0]:.3f} to {losses[-1]:.3f}",
    )
    return line, num_tokens / took


def _timed_step(worker: TrainingWorker, setup: Setup, batch: Batch) -> tuple[dict[str, float], float]:
    started = time.perf_counter()
    metrics = numbers(worker.train_step(batch, NextToken()))
    setup.accelerator.synchronize()
    return metrics, time.perf_counter() - started


def _expect(
    setup: Setup,
    report: Report,
    subject: str,
    shape: Shape,
    batch: Batch,
    case: Case,
    speed: float,
    step_seconds: StepSeconds | None,
) -> None:
    """Compare with what the ledger's counts of a step come to on this chip; it counts neither padding nor compiled
    code."""
    expected = None
    is_counted = case.layout == "packed" and not case.settings.get("compile")
    if setup.chip is not None and step_seconds is not None and is_counted:
        lengths, folder = batch.ragged("tokens").lengths, setup.folder(shape, dtype="bfloat16")
        took = step_seconds(setup.chip, folder, shape, lengths, case.settings, chunk_size=_chunk_size(setup))
        expected = int(lengths.sum()) / took
    report.speed(subject, "tokens/s", speed, expected, "the ledger's bytes and products" if expected else "")


def _chunk_size(setup: Setup) -> int:
    return setup.pick(64, 2048)


def _share_of_peak(setup: Setup, rate: float) -> str:
    peak = peak_flops(setup.kind.chip)
    return "" if peak is None else f"{rate / peak:.1%}"
