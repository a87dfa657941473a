"""One pool of ranks for the whole suite: starting one and importing Megatron takes longer than most tests do."""

import pytest

from rl_core.selfcheck.rank_pool import RankPool, preload
from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

preload("rl_megatron.worker")


@pytest.fixture(scope="session")
def ranks():
    with RankPool(8) as pool:
        yield pool
