"""The model's own dropout, and losses that compare with logprobs of another pass."""

import pytest

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.model_worker import SGD, make_batch

FACTORY = "dtensor_factories:build"


class ComparingLoss(TokenLoss):
    """The same loss, which also names a column of another pass."""

    columns = (*TokenLoss.columns, "prev_logprobs")


@pytest.mark.parametrize(
    ("compares", "overrides", "drops"),
    [
        pytest.param(False, {}, True, id="of the config, under a supervised loss [Human-Agent-Society/reef#536]"),
        pytest.param(True, {}, False, id="off where a ratio would not be 1 [huggingface/trl#3234]"),
        pytest.param(True, {"attention_dropout": 0.5}, True, id="on if asked for [Human-Agent-Society/reef#536]"),
    ],
)
def test_dropout_of_the_model(ranks, tmp_path, compares, overrides, drops):
    folder = write_tiny_model(tmp_path / "model", "llama", attention_dropout=0.5)
    batch = make_batch((9, 17))
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, hf_config_overrides=overrides)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), 1, attention_backend="eager") as model:
        prev = model.infer(batch, [LOGPROBS]).ragged("logprobs")
        batch = batch.with_columns({"prev_logprobs": prev})
        loss = ComparingLoss() if compares else TokenLoss()
        trained = model.evaluate(batch, loss)["loss"]
        assert (model.train_step(batch, loss)["loss"] != pytest.approx(trained, rel=1e-6)) == drops
