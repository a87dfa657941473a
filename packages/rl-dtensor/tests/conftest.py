"""Processes that all tests of this package share, how many of their cases run, and the ledger of the benchmarks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

preload("rl_dtensor.worker", "peft")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

sys.path.append(str(BENCHMARKS))
collect_ignore = [] if BENCHMARKS.is_dir() else ["test_ledger.py", "model/test_recompute_choice.py"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
