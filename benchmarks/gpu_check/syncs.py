"""Waits of the host for the device around microbatches."""

from __future__ import annotations

from collections import Counter

from gpu_check.report import Report
from gpu_check.setup import Setup
from gpu_check.workers import NextToken, batch_of, config_of, open_worker, packed
from rl_core.data.batch import Batch
from rl_core.model import LOGPROBS
from rl_core.torch.training.worker import TrainingWorker

MOST_PER_MICROBATCH = 0
"""Waits per microbatch: it is laid out on the host and copied without a wait, and what a step reports is read at its
end."""
FEW, MANY = 1, 5
"""Numbers of microbatches of two steps, whose difference is the cost of one more microbatch."""


def check(setup: Setup, report: Report) -> None:
    """Count the waits of steps with few and with many microbatches; list where they come from."""
    from rl_dtensor.plugin import PLUGIN

    name, shape = next(iter(setup.models.items()))
    length = setup.pick(16, 512)
    batches = {num: batch_of([length] * (2 * num), shape.vocab) for num in (FEW, MANY)}
    config = config_of(
        setup.folder(shape, dtype="bfloat16"), length, logprob_chunk_size=2 * length, **packed(2 * length)
    )
    with open_worker(PLUGIN, config, setup) as worker:
        for what, run in (("training step", _train), ("reads of logprobs", _infer)):
            with report.attempt(f"{name}, {what}"):
                run(worker, batches[MANY])  # compiles, allocates and fills caches
                _compare(setup, report, what, {num: _waits(setup, run, worker, batches[num]) for num in (FEW, MANY)})


def _train(worker: TrainingWorker, batch: Batch) -> None:
    worker.train_step(batch, NextToken())


def _infer(worker: TrainingWorker, batch: Batch) -> None:
    worker.infer(batch, [LOGPROBS])


def _waits(setup, run, worker: TrainingWorker, batch: Batch) -> Counter[str]:  # type: ignore[no-untyped-def]
    setup.accelerator.synchronize()
    with setup.accelerator.waits() as found:
        run(worker, batch)
    return found


def _compare(setup: Setup, report: Report, what: str, waits: dict[int, Counter[str]]) -> None:
    more = MANY - FEW
    per_microbatch = {
        place: (count - waits[FEW][place]) / more
        for place, count in waits[MANY].most_common()
        if count > waits[FEW][place]
    }
    total = sum(per_microbatch.values())
    oracle = "sync_debug_mode" if setup.accelerator.measures_memory else "operations that would wait on a GPU"
    report.within(f"{what}: waits per microbatch", oracle, total, MOST_PER_MICROBATCH)
    rows = [(place, str(count), f"{per_microbatch.get(place, 0.0):g}") for place, count in waits[MANY].most_common()]
    report.figures(
        f"Waits of a {what} of {MANY} microbatches", ("line", "times", "per microbatch"), rows or [("none", "0", "0")]
    )
