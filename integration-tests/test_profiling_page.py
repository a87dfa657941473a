"""The page on profiling has the figures that the ledger computes."""

import subprocess
import sys
from pathlib import Path

from rl_core.testing.exhaustive import exhaustive

BENCHMARK = Path(__file__).parents[1] / "benchmarks/ledger.py"


@exhaustive
def test_times_by_phase_on_the_page_are_those_of_the_code():
    done = subprocess.run([sys.executable, str(BENCHMARK), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
