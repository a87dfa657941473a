"""One pool of ranks for the whole suite: starting one and importing Megatron takes longer than most tests do."""

import pytest

from rl_core.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    with RankPool(4) as pool:
        yield pool
