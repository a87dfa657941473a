"""Puts the benchmarks on the path, which contain the ledger; its tests need a checkout."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[5] / "benchmarks"

sys.path.append(str(BENCHMARKS))
collect_ignore_glob = [] if BENCHMARKS.is_dir() else ["test_*"]
