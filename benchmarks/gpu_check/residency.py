"""A worker that leaves its device and comes back, many times."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpu_check.report import Report
from gpu_check.setup import Setup
from gpu_check.workers import (
    NextToken,
    batch_of,
    config_of,
    kept_digests,
    kept_tensors,
    num_different,
    numbers,
    open_worker,
    packed,
)
from rl_core.plugins import BackendPlugin
from rl_core.torch.training.worker import TrainingWorker

ROUNDS = 50
LEAST_FREED = 0.9
"""Least share of the offloaded bytes that must be freed."""
MOST_GROWTH = 64 * 2**20
"""Most growth of device memory in use from the second round to the last."""
MOST_HOST_GROWTH = 256 * 2**20


def check(setup: Setup, report: Report) -> None:
    """Check rl-dtensor's worker."""
    from rl_dtensor.plugin import PLUGIN

    check_rounds(PLUGIN, setup, report)


def check_rounds(plugin: BackendPlugin, setup: Setup, report: Report, rounds: int = ROUNDS) -> None:
    """Offload and onload after a step: memory is freed and taken alike each time, and all comes back bit for bit."""
    name, shape = next(iter(setup.models.items()))
    batch = batch_of([setup.pick(16, 512)] * 4, shape.vocab)
    config = config_of(setup.folder(shape, dtype="bfloat16"), 512, **packed(setup.pick(64, 2048)))
    with open_worker(plugin, config, setup) as worker:
        first = numbers(worker.train_step(batch, NextToken()))["loss"]
        before = kept_digests(worker)
        num_bytes = sum(tensor.nbytes for tensor in kept_tensors(worker))
        with report.attempt(f"{name}, {rounds} rounds"):
            _rounds(setup, report, worker, num_bytes, rounds)
        changed = num_different(before, kept_digests(worker))
        report.holds(
            "parameters and optimizer state come back",
            "digests before the first round",
            changed == 0,
            f"{changed} of {len(before)} tensors differ",
        )
        last = numbers(worker.train_step(batch, NextToken()))["loss"]
        report.holds("training goes on", "the loss before", last < first, f"{first:.3f} to {last:.3f}")


def _rounds(setup: Setup, report: Report, worker: TrainingWorker, num_bytes: int, rounds: int) -> None:
    accelerator = setup.accelerator
    started_with = accelerator.used_bytes()
    away, back, host, taken = [], [], [], []
    for _ in range(rounds):
        started = time.perf_counter()
        worker.offload()
        accelerator.synchronize()
        left = time.perf_counter()
        away.append(accelerator.used_bytes(trims=False))
        resumed = time.perf_counter()
        worker.onload()
        accelerator.synchronize()
        taken.append((left - started, time.perf_counter() - resumed))
        back.append(accelerator.used_bytes())
        host.append(_host_bytes())
    gigabytes = num_bytes / 1e9
    expected = setup.chip and setup.chip.host_bytes / 1e9
    for name, seconds in zip(("offload", "onload"), taken[-1], strict=True):
        report.speed(name, "GB/s", gigabytes / seconds, expected, "PCIe 5")
    report.figures(
        f"{gigabytes:.2f} GB of parameters and optimizer state",
        ("round", "offload, GB/s", "onload, GB/s", "device away, GB", "device back, GB", "host, GB"),
        [
            (
                str(index + 1),
                f"{gigabytes / taken[index][0]:.1f}",
                f"{gigabytes / taken[index][1]:.1f}",
                f"{away[index] / 1e9:.2f}",
                f"{back[index] / 1e9:.2f}",
                f"{host[index] / 1e9:.2f}",
            )
            for index in sorted({0, 1, rounds // 2, rounds - 1})
        ],
    )
    report.within("host memory grows, MB", "the second round", (host[-1] - host[1]) / 1e6, MOST_HOST_GROWTH / 1e6)
    if not accelerator.measures_memory:
        report.skip("device memory", "host memory is the device's")
        return
    freed = (started_with - away[0]) / num_bytes
    report.holds("memory freed", "bytes that left", freed >= LEAST_FREED, f"{freed:.0%} (at least {LEAST_FREED:.0%})")
    for what, used in (("away", away), ("back", back)):
        growth = (max(used[1:]) - used[1]) / 1e6
        report.within(f"device memory {what} grows, MB", "mem_get_info in the second round", growth, MOST_GROWTH / 1e6)


def _host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
