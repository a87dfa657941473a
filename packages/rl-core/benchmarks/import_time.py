"""Milliseconds that `import rl_core` takes in a fresh interpreter, best and median of several. Budget: 100 ms."""

import statistics
import subprocess
import sys

RUNS = 10
TIMED = "import time; start = time.perf_counter(); import {module}; print(1000 * (time.perf_counter() - start))"


def milliseconds(module: str) -> float:
    """Time one import of `module`, interpreter start excluded."""
    run = subprocess.run(
        [sys.executable, "-c", TIMED.format(module=module)], capture_output=True, text=True, check=True
    )
    return float(run.stdout)


if __name__ == "__main__":
    for module in sys.argv[1:] or ["rl_core"]:
        taken = [milliseconds(module) for _ in range(RUNS)]
        print(f"{module}: best {min(taken):.1f} ms, median {statistics.median(taken):.1f} ms of {RUNS}")
