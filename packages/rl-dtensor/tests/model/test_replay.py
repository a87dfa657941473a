"""Tokens go to the experts that a batch names, on every mesh as in one process."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import SIZES, write_tiny_model
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.model_worker import LAYOUTS as BATCHINGS
from rl_core.testing.model_worker import make_batch
from rl_core.testing.torch.reported_routing import RoutedOracle, with_random_routing
from rl_dtensor.model.layers.replay import RoutingRecorder, intercept, routers_of, routing_shape
from rl_dtensor.selfcheck import MESHES

PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 4, 4, 2
FIELDS = {
    "num_hidden_layers": NUM_LAYERS,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
RECOMPUTED = {"recompute": "full"}
BUILD = "dtensor_factories:build"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("routed"), "qwen3_moe", **FIELDS)
    batch = with_random_routing(make_batch(), NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN)
    oracle = RoutedOracle(folder, batch)
    logprobs = oracle.infer(batch, [LOGPROBS])["logprobs"]
    assert abs(logprobs - Oracle(folder).infer(batch, [LOGPROBS])["logprobs"]).max() > 1e-3
    metrics = oracle.train_step(batch, TokenLoss(), PLAIN, 0.5)
    return folder, batch, logprobs, metrics, dict(oracle.model.named_parameters())


def config_of(folder, batching="padded-3"):
    return ModelConfig(
        model_name=str(folder), precision="float32", max_grad_norm=0.5, optimizer=PLAIN, **BATCHINGS[batching]
    )


@pytest.mark.parametrize(
    ("mesh", "batching", "options"),
    [
        ("1", "packed-16", RECOMPUTED),
        ("tp2+sp", "packed-16", {}),
        pytest.param("pp2", "padded-3", {**RECOMPUTED, "pipeline_chunks_per_rank": 2}, marks=exhaustive),
        pytest.param("tp2", "padded-3", {}, marks=exhaustive),
        pytest.param("ep2 x fsdp2", "padded-1", {}, marks=exhaustive),
        pytest.param("cp2", "packed-16", {"recompute": "selective"}, marks=exhaustive),
    ],
)
def test_reads_and_a_step_follow_the_experts_of_the_batch(ranks, prepared, tmp_path, mesh, batching, options):
    folder, batch, logprobs, metrics, stepped = prepared
    num_ranks, settings = MESHES[mesh]
    settings = {"moe_router_replay": True, **settings, **options}
    with PooledModel(ranks, BUILD, config_of(folder, batching), ModelSpec(), num_ranks, **settings) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        np.testing.assert_allclose(found, logprobs, atol=1e-5, rtol=1e-5)
        assert model.evaluate(batch, TokenLoss())["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-5)
        trained = model.train_step(batch, TokenLoss())
        for name, value in metrics.items():
            assert trained[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        model.export(str(tmp_path))
    exported = dict(Oracle(tmp_path).model.named_parameters())
    for name, parameter in stepped.items():
        np.testing.assert_allclose(exported[name].detach(), parameter.detach(), atol=1e-5, rtol=1e-5, err_msg=name)


def test_a_batch_without_routing_or_of_another_model_is_refused(ranks, prepared):
    folder, batch, *_ = prepared
    with PooledModel(ranks, BUILD, config_of(folder), ModelSpec(), 1, moe_router_replay=True) as model:
        with pytest.raises(WorkerError, match="needs the column 'routed_experts'"):
            model.train_step(make_batch(), TokenLoss())
        # such as rows by which an engine's weights are checked
        free = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        np.testing.assert_allclose(free, Oracle(folder).infer(batch, [LOGPROBS])["logprobs"], atol=1e-5, rtol=1e-5)
        with pytest.raises(WorkerError, match=r"\[layers, experts per token\] \(3, 2\), the model \(4, 2\)"):
            model.infer(with_random_routing(make_batch(), 3, NUM_EXPERTS, NUM_CHOSEN), [LOGPROBS])
        with pytest.raises(WorkerError, match="expert 7, but the model has 4"):
            model.infer(with_random_routing(make_batch(), NUM_LAYERS, 8, NUM_CHOSEN), [LOGPROBS])
        model.infer(batch, [LOGPROBS])


def test_replay_of_a_model_without_experts_is_refused(ranks, tmp_path):
    folder = write_tiny_model(tmp_path)
    with (
        pytest.raises(WorkerError, match="routing of qwen3 models cannot be replayed: they have no experts"),
        PooledModel(ranks, BUILD, config_of(folder), ModelSpec(), 1, moe_router_replay=True),
    ):
        pass


FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def model_of(family):
    config = AutoConfig.for_model(family, **{**SIZES, "num_experts_per_tok": 2, **FAMILIES[family]})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_own_choice_of_a_familys_routers_replayed_changes_nothing(family):
    model, tokens = model_of(family), torch.arange(3, 13).view(2, 5)
    plain = model(tokens, use_cache=False).logits
    recorder = RoutingRecorder(model)
    assert torch.equal(model(tokens, use_cache=False).logits, plain)
    experts = recorder.take(2)
    assert experts.shape == (2, 5, 2, 2)
    replayed, other = model_of(family), model_of(family)
    for layer, router in routers_of(replayed):
        given = torch.from_numpy(experts[:, :, layer].reshape(10, 2)).long()
        intercept(router, routing_shape(replayed), lambda own, given=given: given, family)
    for _, router in routers_of(other):
        intercept(router, routing_shape(other), lambda own: (own + 1) % 4, family)
    torch.testing.assert_close(replayed(tokens, use_cache=False).logits, plain)
    assert (other(tokens, use_cache=False).logits - plain).abs().max() > 1e-4


def test_routers_that_choose_otherwise_are_refused():
    model = model_of("mixtral")
    layer, router = routers_of(model)[0]
    router.forward = lambda hidden: (None, torch.ones(len(hidden), 2), torch.zeros(len(hidden), 2, dtype=torch.int64))
    intercept(router, routing_shape(model), lambda own: own, "mixtral")
    with pytest.raises(ValueError, match="mixtral models cannot be replayed: their routers do not choose"):
        model(torch.arange(3, 8)[None])
    assert layer == 0
    model._can_record_outputs = model.model._can_record_outputs = None
    with pytest.raises(ValueError, match="does not say which modules are their routers"):
        routers_of(model)
