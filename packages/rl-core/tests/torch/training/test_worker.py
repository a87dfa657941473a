"""The parts that all training backends share make a model worker of the smallest backend."""

import pytest

from rl_core.testing.model_worker import ModelWorkerSuite
from rl_core.testing.rank_pool import RankPool


class TestTrainingWorker(ModelWorkerSuite):
    factory = "rl_core.testing.torch.plain_backend:build"

    @pytest.fixture(scope="session")
    @classmethod
    def pool(cls, pool: RankPool) -> RankPool:
        return pool
