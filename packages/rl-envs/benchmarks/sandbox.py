"""The abuses that each level of the sandbox contains, and its programs per second: `python benchmarks/sandbox.py`."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

from rl_envs.sandbox import abuses
from rl_envs.sandbox.program import Isolation, Program
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable

PROGRAM = Program("print(sum(int(x) for x in input().split()))", stdin=b"1 2 3\n")


def rate(isolation: Isolation, side_by_side: int, seconds: float) -> tuple[float, float]:
    """Programs per second, and the median of their seconds."""
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
    return len(times) / seconds, statistics.median(times)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--no-abuses", action="store_true", help="measure speed alone")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{'isolation':12} {'1 at a time':>14} {'2 at a time':>14} {'median':>10}")
    for isolation in get_args(Isolation):
        with contextlib.suppress(SandboxUnavailable):
            (alone, median), (two, _) = (rate(isolation, count, arguments.seconds) for count in (1, 2))
            print(f"{isolation:12} {alone:12.0f}/s {two:12.0f}/s {1000 * median:7.1f} ms")
    if not arguments.no_abuses:
        print("\nWays out that each level leaves open:")
        isolations = get_args(Isolation)
        for name, found in abuses.table(isolations):
            shown = (f"{isolation}: {how}" for isolation, how in zip(isolations, found, strict=True) if how)
            print(f"{name}: {'; '.join(shown) or 'contained by all'}", flush=True)


if __name__ == "__main__":
    main()
