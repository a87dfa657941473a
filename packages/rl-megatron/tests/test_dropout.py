"""The model's own dropout, and losses that compare with logprobs of another pass."""

import pytest
from layouts import write_family

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import SGD, make_batch

ADAPTERS = {"lora_cfg": LoraConfig(enabled=True, dropout=0.5)}
ASKED = {"hf_config_overrides": {"attention_dropout": 0.5}}


class ComparingLoss(TokenLoss):
    """The same loss, which also names a column of another pass."""

    columns = (*TokenLoss.columns, "prev_logprobs")


@pytest.mark.parametrize("family", partly_exhaustive(["llama", "deepseek_v3"], always=["llama"]))
@pytest.mark.parametrize(
    ("loss", "settings", "drops"),
    [
        pytest.param(TokenLoss(), {}, True, id="of the config, under a supervised loss"),
        pytest.param(ComparingLoss(), {}, False, id="off where a ratio would not be 1"),
        pytest.param(ComparingLoss(), ASKED, True, id="on if asked for"),
    ],
)
def test_dropout_of_the_model(ranks, tmp_path, family, loss, settings, drops):
    folder = write_family(tmp_path, family, attention_dropout=0.5)
    with open_model(ranks, folder, settings) as model:
        assert steps_differ(model, loss) == drops


def test_dropout_returns_after_a_loss_that_compares(ranks, tmp_path):
    folder = write_family(tmp_path, "llama", attention_dropout=0.5)
    with open_model(ranks, folder, {}) as model:
        assert not steps_differ(model, ComparingLoss())
        assert steps_differ(model, TokenLoss())


def test_dropout_of_adapters_stays_on(ranks, tmp_path):
    rates = []
    with open_model(ranks, write_family(tmp_path, "llama", attention_dropout=0.5), ADAPTERS) as model:
        for loss in (TokenLoss(), ComparingLoss()):
            steps_differ(model, loss)
            rates += ranks.run("megatron_factories:dropout_rates", [()])
    assert rates == [{"attention": {0.5}, "adapters": {0.5}}, {"attention": {0.0}, "adapters": {0.5}}]


@pytest.mark.parametrize(("compares", "rate"), [(False, 0.5), (True, 0.0)])
def test_dropout_of_hidden_states_follows_the_same_rule(ranks, tmp_path, compares, rate):
    with open_model(ranks, write_family(tmp_path, "llama"), {}):
        assert ranks.run("megatron_factories:hidden_dropout", [(0.5, compares)]) == [{rate}]


def open_model(ranks, folder, settings):
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, **settings)
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 1)


def steps_differ(model, loss):
    """Return whether a training pass gives another loss than an evaluation with the same weights."""
    batch = make_batch((9, 17))
    batch = batch.with_columns({"prev_logprobs": model.infer(batch, [LOGPROBS]).ragged("logprobs")})
    evaluated = model.evaluate(batch, loss)["loss"]
    return model.train_step(batch, loss)["loss"] != pytest.approx(evaluated, rel=1e-6)
