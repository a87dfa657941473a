"""Processes that all tests of this package share, and how many of their cases run."""

from collections.abc import Iterator

import pytest

from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

preload("rl_dtensor.worker", "peft")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
