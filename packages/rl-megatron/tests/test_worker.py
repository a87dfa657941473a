"""The worker keeps the contract of model workers."""

import pytest

from rl_core.testing.model_worker import ModelWorkerSuite


class TestMegatronWorker(ModelWorkerSuite):
    factory = "megatron_factories:build"

    @pytest.fixture(scope="session")
    def pool(self, ranks):
        return ranks
