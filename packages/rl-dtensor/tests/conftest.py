"""Processes that all tests of this package share."""

from collections.abc import Iterator

import pytest

from rl_core.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
