"""The parts that all training backends share make a model worker of the smallest backend."""

from pathlib import Path

import pytest

from rl_core.errors import WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.model_worker import LAYOUTS, SGD, ModelWorkerSuite, make_batch

FACTORY = "rl_core.testing.torch.plain_backend:build"


def open_model(pool: RankPool, folder: Path, **settings: object) -> PooledModel:
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, **LAYOUTS["padded-1"], **settings)
    return PooledModel(pool, FACTORY, config, ModelSpec(), 1)


class TestTrainingWorker(ModelWorkerSuite):
    factory = FACTORY

    @pytest.fixture(scope="session")
    @classmethod
    def pool(cls, pool: RankPool) -> RankPool:
        return pool

    def test_a_pass_that_fails_leaves_no_gradient_behind(self, pool, tmp_path):
        folder = write_tiny_model(tmp_path)
        with open_model(pool, folder) as model:
            expected = model.train_step(make_batch(), TokenLoss())["grad_norm"]
        with open_model(pool, folder) as model:
            with pytest.raises(WorkerError, match="row 0 has no tokens"):
                model.train_step(make_batch((6, 0)), TokenLoss())
            assert model.train_step(make_batch(), TokenLoss())["grad_norm"] == expected

    def test_packing_efficiency_is_the_share_of_the_budget_that_is_filled(self, pool, tmp_path):
        settings = {"precision": "float32", "optimizer": SGD}
        packing = SequencePackingConfig(train_mb_tokens=8)
        config = ModelConfig(model_name=str(write_tiny_model(tmp_path)), sequence_packing=packing, **settings)
        with PooledModel(pool, FACTORY, config, ModelSpec(), 2) as model:
            # 6 + 2 and 5 + 3 on one rank, 4 + 4 and 5 on the other
            metrics = model.train_step(make_batch((6, 2, 5, 3, 4, 4, 5)), TokenLoss())
            assert metrics["packing_efficiency"] == 29 / (4 * 8)
        with open_model(pool, tmp_path) as model:
            assert "packing_efficiency" not in model.train_step(make_batch(), TokenLoss())

    def test_a_model_that_cannot_be_built_leaves_its_groups(self, pool, tmp_path):
        folder = write_tiny_model(tmp_path)
        with pytest.raises(WorkerError, match="no adapters"):
            open_model(pool, folder, lora_cfg=LoraConfig(enabled=True))
        with open_model(pool, folder) as model:
            assert model.train_step(make_batch(), TokenLoss())["skipped_steps"] == 0
