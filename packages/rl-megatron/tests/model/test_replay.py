"""Tokens go to the experts that a batch names, on every layout as in one process."""

import numpy as np
import pytest
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.model_worker import LAYOUTS as BATCHINGS
from rl_core.testing.model_worker import make_batch
from rl_core.testing.torch.reported_routing import RoutedOracle, with_random_routing

PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 4, 4, 2
RECOMPUTED = {"recompute": "full"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = write_family(tmp_path_factory.mktemp("routed"), "qwen3_moe")
    batch = with_random_routing(make_batch(), NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN)
    oracle = RoutedOracle(folder, batch)
    logprobs = oracle.infer(batch, [LOGPROBS])["logprobs"]
    assert abs(logprobs - Oracle(folder).infer(batch, [LOGPROBS])["logprobs"]).max() > 1e-3
    metrics = oracle.train_step(batch, TokenLoss(), PLAIN, 0.5)
    return folder, batch, logprobs, metrics, dict(oracle.model.named_parameters())


@pytest.mark.parametrize(
    ("layout", "batching", "options"),
    [
        ("tp2 ep2+sp", "packed-16", {}),
        ("pp2 virtual", "padded-3", RECOMPUTED),
        pytest.param("cp2", "packed-16", {"recompute": "selective", "recompute_modules": ["moe"]}, marks=exhaustive),
        pytest.param("dp2", "padded-1", {}, marks=exhaustive),
    ],
)
def test_reads_and_a_step_follow_the_experts_of_the_batch(ranks, prepared, tmp_path, layout, batching, options):
    folder, batch, logprobs, metrics, stepped = prepared
    num_ranks, settings = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    config = ModelConfig(
        model_name=str(folder), precision="float32", max_grad_norm=0.5, optimizer=PLAIN, **BATCHINGS[batching]
    )
    build = "megatron_factories:build"
    with PooledModel(
        ranks, build, config, ModelSpec(), num_ranks, moe_router_replay=True, **settings, **options
    ) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        np.testing.assert_allclose(found, logprobs, atol=1e-5, rtol=1e-5)
        assert model.evaluate(batch, TokenLoss())["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-5)
        trained = model.train_step(batch, TokenLoss())
        for name, value in metrics.items():
            assert trained[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        model.export(str(tmp_path))
        with pytest.raises(WorkerError, match="needs the column 'routed_experts'"):
            model.train_step(make_batch(), TokenLoss())
    exported = dict(Oracle(tmp_path).model.named_parameters())
    for name, parameter in stepped.items():
        np.testing.assert_allclose(exported[name].detach(), parameter.detach(), atol=1e-5, rtol=1e-5, err_msg=name)
