"""Training steps of a whole worker: exact on a small model, then speed and memory on real shapes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

from gpu_check.oracle import PlainModel, relative
from gpu_check.report import Report, Skip, logged
from gpu_check.setup import Setup, Shape
from gpu_check.workers import (
    SGD,
    NextToken,
    batch_of,
    config_of,
    kept_digests,
    num_different,
    numbers,
    open_worker,
    packed,
    padded,
)
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.plugins import BackendPlugin
from rl_core.torch.training.flops import peak_flops
from rl_core.torch.training.memory import GAPS
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
    Case("packed", {"recompute": "auto"}),
    Case("packed", {"recompute": "selective"}),
    Case("packed", {"recompute": "full"}),
    Case("padded", {"recompute": "full"}),
)


def check(setup: Setup, report: Report) -> None:
    """Check rl-dtensor's worker."""
    from gpu_check.expected_step import step_seconds
    from rl_dtensor.plugin import PLUGIN

    check_parity(PLUGIN, setup, report)
    with report.attempt("reshard_after"):
        _check_gathering(PLUGIN, setup, report)
    check_shapes(PLUGIN, setup, report, CASES, step_seconds=step_seconds)


def check_parity(plugin: BackendPlugin, setup: Setup, report: Report, kind: str = "", **backend: Any) -> None:
    """Compare losses and gradient norms of a few steps of a small model, in both precisions and layouts.

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


def _check_gathering(plugin: BackendPlugin, setup: Setup, report: Report) -> None:
    """Check that parameters which stay gathered over the microbatches of a step have the same bits as ones gathered in
    each pass."""
    batch = batch_of(LENGTHS, setup.parity.vocab)
    config = config_of(setup.folder(setup.parity), 128, logprob_chunk_size=32, **LAYOUTS["packed"])
    kept = []
    for times in ("layer", "step"):
        with open_worker(plugin, config, setup, reshard_after=times) as worker:
            for _ in range(NUM_STEPS):
                worker.train_step(batch, NextToken())
            kept.append(kept_digests(worker))
    differ = num_different(*kept)
    found = f"{differ} of {len(kept[0])} tensors differ"
    report.holds(f"reshard_after step, {NUM_STEPS} steps", "the bits of reshard_after layer", differ == 0, found)


def check_shapes(
    plugin: BackendPlugin,
    setup: Setup,
    report: Report,
    cases: tuple[Case, ...],
    kind: str = "",
    step_seconds: StepSeconds | None = None,
) -> None:
    """Measure loss, speed and memory of real shapes, or of a tiny one if the setup is small.

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
        ("", "tokens/s", "TFLOP/s", "MFU", "peak, GB", "first step, s", "loss, first to last"),
        rows,
    )


def _lengths(setup: Setup) -> Iterator[int]:
    """Yield rows of mixed lengths, 8192 tokens together; short enough for the oracle's scores."""
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
    """Return a line of figures, and tokens per second; the loss is compared with the oracle's, and must fall on a
    repeated batch."""
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
        with logged("rl_core.torch.training.memory") as planned:
            steps = [_timed_step(worker, setup, batch) for _ in range(5)]
        peak_bytes = setup.accelerator.peak_bytes()
        if case.settings.get("compile"):
            _check_graphs(worker, shape, report, subject)
    _check_plan(setup, report, subject, planned)
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
        f"{steps[0][1]:.2f}",
        f"{losses[0]:.3f} to {losses[-1]:.3f}",
    )
    return line, num_tokens / took


def _check_graphs(worker: TrainingWorker, shape: Shape, report: Report, subject: str) -> None:
    """Check that compiled layers compile nothing for other numbers of tokens."""
    before = counters["stats"]["unique_graphs"]
    for lengths in ((5, 3), (17,), (40, 9, 2)):
        worker.train_step(batch_of(lengths, shape.vocab), NextToken())
    more = counters["stats"]["unique_graphs"] - before
    report.holds(f"{subject}: graphs", "no more for other rows", more == 0, f"{before}, and {more} more")


def _check_plan(setup: Setup, report: Report, subject: str, planned: Sequence[str]) -> None:
    """Check that the tensors of the first step fit into the plan that was made for it; the plan itself is a table."""
    if not setup.accelerator.measures_memory:
        report.skip(f"{subject}: plan of memory", "host memory is the device's")
        return
    report.figures(f"{subject}: plan of memory", ("",), [(line,) for text in planned for line in text.splitlines()])
    sizes = [
        found.groups()
        for text in planned
        if (found := re.search(r"up to ([\d.]+) GB .* ([\d.]+) GB were planned", text))
    ]
    for peak, plan in sizes[:1]:
        bound = (1 + GAPS) * float(plan)  # A plan leaves this for tensors that are not counted.
        report.within(f"{subject}: peak of the first step, GB", "the plan", float(peak), bound)
    if not sizes:
        report.holds(f"{subject}: plan of memory", "is logged", False, "; ".join(planned) or "nothing")


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
