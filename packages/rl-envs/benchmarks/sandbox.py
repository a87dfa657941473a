"""The abuses that each level of the sandbox contains, its programs per second, and the CPU time that one takes.

    python benchmarks/sandbox.py [--seconds 10] [--no-abuses]

Programs per second are those of a machine that does nothing else. CPU time counts every process of a program, its
keeper's included, and what the sandbox does for it here; other work of the machine adds little to it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import get_args

from rl_envs.sandbox import abuses
from rl_envs.sandbox.program import Isolation, Program
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable

PROGRAM = Program("print(sum(int(x) for x in input().split()))", stdin=b"1 2 3\n")


@dataclass(frozen=True)
class Speed:
    """Of a sandbox, measured over some seconds.

    Args:
        per_second: programs.
        median_s: seconds of a program.
        cpu_s: CPU seconds of a program, in all processes.
    """

    per_second: float
    median_s: float
    cpu_s: float


def speed(isolation: Isolation, side_by_side: int, seconds: float) -> Speed:
    """Run a short program again and again, so many at a time."""
    before = cpu_seconds()
    Sandbox(isolation).close()
    start_up, before = cpu_seconds() - before, cpu_seconds()
    with Sandbox(isolation) as sandbox, ThreadPoolExecutor(side_by_side) as pool:
        end = time.monotonic() + seconds

        def work(_: int) -> list[float]:
            took = []
            while time.monotonic() < end:
                outcome = sandbox.run(PROGRAM)
                assert outcome.stdout == b"6\n", outcome
                took.append(outcome.seconds)
            return took

        times = [each for some in pool.map(work, range(side_by_side)) for each in some]
    cpu_s = (cpu_seconds() - before - start_up) / len(times)
    return Speed(len(times) / seconds, statistics.median(times), cpu_s)


def cpu_seconds() -> float:
    """CPU time of this process and of those that have ended below it."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--no-abuses", action="store_true", help="measure speed alone")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'isolation':12} {'1 at a time':>14} {'2 at a time':>14} {'median':>10} {'CPU':>10}")
    for isolation in get_args(Isolation):
        with contextlib.suppress(SandboxUnavailable):
            alone, two = (speed(isolation, count, arguments.seconds) for count in (1, 2))
            rates = f"{alone.per_second:12.0f}/s {two.per_second:12.0f}/s"
            print(f"{isolation:12} {rates} {1000 * alone.median_s:7.1f} ms {1000 * alone.cpu_s:7.1f} ms", flush=True)
    if not arguments.no_abuses:
        print("\nWays out that each level leaves open:")
        isolations = get_args(Isolation)
        with abuses.opened(isolations) as sandboxes:
            for name, entries in abuses.table(sandboxes):
                open_at = [level for level, entry in zip(isolations, entries, strict=True) if entry == abuses.BREACHED]
                print(f"{name}: {', '.join(open_at) or 'contained by all'}", flush=True)


if __name__ == "__main__":
    main()
