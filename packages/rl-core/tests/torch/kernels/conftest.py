"""A process in which Triton's interpreter runs the kernels."""

from collections.abc import Iterator

import pytest

from rl_core.selfcheck.rank_pool import RankPool
from rl_core.testing.torch.interpreted import interpret_kernels


@pytest.fixture(scope="session")
def interpreter() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        pool.run(interpret_kernels, [()])
        yield pool
