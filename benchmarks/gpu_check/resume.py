"""A checkpoint, restored in another worker."""

from __future__ import annotations

import shutil
import time

from gpu_check.report import Report
from gpu_check.setup import Setup
from gpu_check.training import BOUNDS
from gpu_check.workers import (
    NextToken,
    batch_of,
    config_of,
    kept_digests,
    kept_tensors,
    num_missing,
    numbers,
    open_worker,
    packed,
)
from rl_core.plugins import BackendPlugin


def check(setup: Setup, report: Report) -> None:
    """Check rl-dtensor's worker."""
    from rl_dtensor.plugin import PLUGIN

    check_resume(PLUGIN, setup, report)


def check_resume(plugin: BackendPlugin, setup: Setup, report: Report) -> None:
    """Check that parameters and optimizer state are restored bit for bit, and that the next step equals the original
    run's."""
    name, shape = next(iter(setup.models.items()))
    batch = batch_of([setup.pick(16, 512)] * 4, shape.vocab)
    config = config_of(setup.folder(shape, dtype="bfloat16"), 512, **packed(setup.pick(64, 2048)))
    path = setup.workspace / f"checkpoint-{plugin.name}"
    with report.attempt(name):
        with open_worker(plugin, config, setup) as worker:
            worker.train_step(batch, NextToken())
            num_bytes = sum(tensor.nbytes for tensor in kept_tensors(worker))
            saved = kept_digests(worker)
            started = time.perf_counter()
            worker.save(str(path))
            save_s = time.perf_counter() - started
            expected = numbers(worker.train_step(batch, NextToken()))
        with open_worker(plugin, config, setup) as worker:
            worker.train_step(batch, NextToken())  # makes the optimizer's state, of other values
            worker.train_step(batch, NextToken())
            started = time.perf_counter()
            worker.load(str(path))  # type: ignore[attr-defined]
            load_s = time.perf_counter() - started
            restored = kept_digests(worker)
            found = numbers(worker.train_step(batch, NextToken()))
        changed = num_missing(saved, restored)
        report.holds(
            "parameters and optimizer state", "digests when saved", changed == 0, f"{changed} of {len(saved)} differ"
        )
        same = found["loss"] == expected["loss"]
        report.holds(
            "loss of the next step", "the run that went on", same, f"{found['loss']!r} and {expected['loss']!r}"
        )
        difference = abs(found["grad_norm"] - expected["grad_norm"]) / expected["grad_norm"]
        report.within("gradient norm of the next step", "the run that went on", difference, BOUNDS["bfloat16"][0])
        report.figures(
            f"checkpoint of {num_bytes / 1e9:.2f} GB", ("save, s", "load, s"), [(f"{save_s:.2f}", f"{load_s:.2f}")]
        )
    shutil.rmtree(path, ignore_errors=True)
