"""The parts that all training backends share make a model worker of the smallest backend."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import WorkerError
from rl_core.model import SCORES, ModelSpec
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

    @pytest.mark.parametrize("pads_with", ["</s>", "<pad>", None])
    def test_transformers_scores_rows_that_end_with_the_padding_of_the_base_model(self, pool, tmp_path, pads_with):
        folder = write_tiny_model(tmp_path / "model", pad_token_id=2, eos_token_id=2)
        words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "</s>": 2}, unk_token="a"))
        padding = {} if pads_with is None else {"pad_token": pads_with}
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", **padding).save_pretrained(folder)
        rows = [[5, 9, 2], [7, 8, 11, 4, 2]]
        batch = Batch({"tokens": Ragged.from_rows([np.array(row) for row in rows], dtype=np.int32)})
        config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, **LAYOUTS["padded-1"])
        with PooledModel(pool, FACTORY, config, ModelSpec(role="reward_model", seed=4), 1) as model:
            expected = model.infer(batch, [SCORES]).array("scores")
            model.export(str(tmp_path / "exported"))
        exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
        with torch.no_grad():
            found = [exported(input_ids=torch.tensor([row])).logits.item() for row in rows]
            assert found == pytest.approx(expected, abs=1e-5)
            padded = torch.tensor([[*rows[0], 0, 0], rows[1]])
            if pads_with != "<pad>":
                with pytest.raises(ValueError, match="no padding token"):
                    exported(input_ids=padded)
                return
            assert exported(input_ids=padded).logits[:, 0].tolist() == pytest.approx(expected, abs=1e-5)

    def test_a_model_that_cannot_be_built_leaves_its_groups(self, pool, tmp_path):
        folder = write_tiny_model(tmp_path)
        with pytest.raises(WorkerError, match="no adapters"):
            open_model(pool, folder, lora_cfg=LoraConfig(enabled=True))
        with open_model(pool, folder) as model:
            assert model.train_step(make_batch(), TokenLoss())["skipped_steps"] == 0
