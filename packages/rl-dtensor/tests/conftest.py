"""Processes that all tests of this package share, and how much of the parity matrix they run."""

from collections.abc import Iterator

import pytest

from rl_core.testing.rank_pool import RankPool, preload


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="the whole parity matrix, not only enough of it")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    preload("rl_dtensor.worker")
    with RankPool(4) as pool:
        yield pool
