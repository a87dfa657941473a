"""The worker keeps the contract of model workers."""

import pytest

from rl_core.testing.model_worker import ModelWorkerSuite
from rl_core.testing.rank_pool import RankPool


class TestDTensorWorker(ModelWorkerSuite):
    factory = "dtensor_factories:build"

    @pytest.fixture(scope="session")
    @classmethod
    def pool(cls, ranks: RankPool) -> RankPool:
        return ranks
