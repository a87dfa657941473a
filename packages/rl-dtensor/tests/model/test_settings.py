"""Every setting of the backend trains as one process does."""

import pytest

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import SGD, make_batch

FACTORY = "dtensor_factories:build"


SETTINGS = [
    {"dp_replicate_size": 2},
    {"recompute": "full"},
    {"cpu_offload": True},
    {"attention_backend": "eager"},
    {"dp_replicate_size": 2, "recompute": "full", "cpu_offload": True},
]


@pytest.mark.parametrize("settings", partly_exhaustive(SETTINGS, always=SETTINGS[-2:]), ids=str)
def test_two_steps_are_those_of_one_process(ranks, tmp_path, settings):
    folder = write_tiny_model(tmp_path / "model")
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD)
    oracle = Oracle(folder)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), 2, **settings) as model:
        for seed in range(2):
            batch = make_batch(seed=seed)
            expected = oracle.train_step(batch, TokenLoss(), SGD, 1.0)
            found = model.train_step(batch, TokenLoss())
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        logprobs = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        assert logprobs == pytest.approx(oracle.infer(batch, [LOGPROBS])["logprobs"], abs=1e-5)
        model.offload()
        model.onload()
        assert (model.infer(batch, [LOGPROBS]).ragged("logprobs").values == logprobs).all()


def test_replicas_must_divide_the_ranks(ranks, tmp_path):
    config = ModelConfig(model_name=str(write_tiny_model(tmp_path)))
    with pytest.raises(WorkerError, match="dp_replicate_size=3 needs a multiple of 3 ranks, but there are 2"):
        PooledModel(ranks, FACTORY, config, ModelSpec(), 2, dp_replicate_size=3)
