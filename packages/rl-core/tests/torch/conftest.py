"""Puts this folder on the path, as the folders below share the cases that ranks run, and keeps the ranks."""

from collections.abc import Iterator

import pytest

from rl_core.selfcheck.rank_pool import RankPool, preload

preload("torch.distributed")


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Two processes that all modules share."""
    with RankPool(2) as ranks:
        yield ranks
