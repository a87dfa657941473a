"""Cost of the traces of a run with 64 workers: CPU seconds of the driver per collection, and of a span in a worker.

    python benchmarks/traces.py [--workers 64] [--spans 40]

The trace is the product's own: its thread, Ray, the estimates of clocks, the files. The workers are calls of Ray actors
that report as many spans as a worker makes in a step; several share a process, so that a small machine can hold them.
Steps with and without a trace alternate. A collection follows each traced step here; in a run there are seconds between
two collections, so that the thread of the trace computes for a small share of the time only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import ray
from measurement import surroundings, table

from rl_core.tracing import spans
from rl_core.tracing.spans import Span, SpanReport, machine_clock
from rl_launch.cluster.ray_start import retried
from rl_launch.run_session.traces.step_trace import MAX_SHARE, PERIOD_S, StepTrace
from rl_launch.runtime.observed_steps import ProcessSpans

NUM_PROCESSES = 4
NUM_STEPS = 20
NUM_RECORDED = 100_000


class SimulatedHost:
    """Reports spans as a host does.

    Args:
        count: Number of spans of a report.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def take_spans(self) -> SpanReport:
        """Return spans that end now."""
        now = time.monotonic_ns()
        found = tuple(Span("calls", "train_step", now - 1000 * (n + 1), now - 1000 * n) for n in range(self._count))
        return SpanReport(1, "host", machine_clock(), now, found)


class Steps:
    """Steps that do nothing, and the CPU seconds that they take in all threads of this process."""

    def __init__(self, trace: StepTrace, written: Path) -> None:
        self._trace = trace
        self._written = written

    def traced(self, step: int) -> tuple[float, float, float]:
        """Return the CPU seconds of a step with its collection and of the trace's thread, and the wall seconds that the
        step waits."""
        cpu, began = time.process_time(), time.perf_counter()
        self._trace.begin_step(step)
        self._trace.end_step(step, {})
        waited = time.perf_counter() - began
        size = _size(self._written)
        while _size(self._written) == size:
            time.sleep(0.05)
        time.sleep(0.2)
        return time.process_time() - cpu, self._trace.thread_s, waited

    def untraced(self) -> float:
        """Return the CPU seconds of the same time without a trace."""
        cpu = time.process_time()
        time.sleep(0.5)
        return time.process_time() - cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--spans", type=int, default=40)
    chosen = parser.parse_args()
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    retried(lambda: ray.init(address="local", num_cpus=2, **quiet), ray.shutdown)
    host: Any = ray.remote(SimulatedHost)
    hosts = [host.options(num_cpus=0).remote(chosen.spans) for _ in range(NUM_PROCESSES)]
    ray.get([each.take_spans.remote() for each in hosts])
    actors = {f"policy-{n}": hosts[n % NUM_PROCESSES] for n in range(chosen.workers)}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "traces"
        steps = Steps(StepTrace(written, ProcessSpans(lambda: actors).collect, period_s=0.0), written)
        traced, idle = [], []
        for step in range(1, NUM_STEPS + 1):
            idle.append(steps.untraced())
            traced.append(steps.traced(step))
        size = _size(written)
    cost = median([cpu for cpu, _, _ in traced[1:]]) - median(idle[1:])
    of_thread = median([thread for _, thread, _ in traced[1:]])
    period = max(PERIOD_S, of_thread / MAX_SHARE)
    rows = [
        ("CPU seconds of the driver per collection", f"{cost:.4f}"),
        ("of them, in the thread of the trace", f"{of_thread:.4f}"),
        ("seconds between two collections, at least", f"{period:.0f}"),
        ("share of a core, at most", f"{100 * cost / period:.2f} %"),
        ("milliseconds that a step waits", f"{1000 * median([waited for _, _, waited in traced]):.3f}"),
        ("microseconds of a span in a worker", f"{_of_a_span():.2f}"),
        ("bytes of a span, plain", f"{size / (NUM_STEPS * chosen.workers * chosen.spans):.0f}"),
    ]
    sys.stdout.write(f"{surroundings('rl-core', 'rl-launch', 'ray')}\n")
    sys.stdout.write(f"{chosen.workers} workers with {chosen.spans} spans each, in {NUM_PROCESSES} processes\n\n")
    sys.stdout.write(table(("", "median"), rows) + "\n")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("step_*")) if folder.is_dir() else 0


def _of_a_span() -> float:
    began = time.process_time()
    for _ in range(NUM_RECORDED):
        with spans.span("calls", "train_step"):
            pass
    return 1e6 * (time.process_time() - began) / NUM_RECORDED


if __name__ == "__main__":
    main()
