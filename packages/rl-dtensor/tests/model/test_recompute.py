"""Activations are recomputed bit for bit: checkpointing changes memory and time, and not the result."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.training.recompute import RecomputePlan
from rl_dtensor.model.layers.recompute import checkpoint_activations
from rl_dtensor.selfcheck import CHECK, shrink, write_tiny

FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
NONE, LAYERS = RecomputePlan(), 2
MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


def backward_flops(plan, attention="sdpa"):
    """Of a backward pass, and of a forward pass through the layers up to the last product of each, which the backward
    pass never needs."""
    config = shrink(AutoConfig.for_model("qwen3", num_hidden_layers=LAYERS))
    assert config.num_hidden_layers == LAYERS
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    checkpoint_activations(model, model.model.layers, plan)
    model.train()
    ids = torch.arange(12)[None]
    loss = model(ids, use_cache=False).logits.float().square().mean()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    unneeded = config.hidden_size * (config.vocab_size + config.num_hidden_layers * config.intermediate_size)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(ids, use_cache=False)
    return counter.get_total_flops(), forward.get_total_flops() - 2 * ids.numel() * unneeded


def test_whole_layers_are_computed_again_or_no_product_is():
    plain, layers = backward_flops(NONE)
    assert backward_flops(RecomputePlan(num_full=LAYERS))[0] == plain + layers
    assert backward_flops(RecomputePlan(num_selective=LAYERS))[0] == plain


def test_only_the_layers_of_the_plan_are_computed_again():
    plain, layers = backward_flops(NONE)
    assert backward_flops(RecomputePlan(num_full=1, num_selective=1))[0] == plain + layers // LAYERS


def test_scores_are_computed_again_where_they_are_made():
    plain, _ = backward_flops(NONE, "eager")
    config = shrink(AutoConfig.for_model("qwen3"))
    scores = 4 * 12 * 12 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    assert backward_flops(RecomputePlan(num_selective=LAYERS), "eager")[0] == plain + scores


@pytest.mark.parametrize(
    ("family", "fields", "mesh", "checkpointing"),
    [
        pytest.param(
            "qwen3", {}, {"tensor_parallel_size": 2, "sequence_parallel": True}, (FULL, SELECTIVE), id="tp2+sp"
        ),
        pytest.param("qwen3_moe", MOE, {"expert_parallel_size": 2}, (SELECTIVE,), id="ep2", marks=exhaustive),
    ],
)
def test_steps_are_the_same_to_the_last_bit(ranks, tmp_path, family, fields, mesh, checkpointing):
    folder = write_tiny(AutoConfig.for_model(family, **fields), tmp_path / "model")
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=OptimizerConfig(kwargs={"lr": 1e-2}),
        hf_config_overrides={"attention_dropout": 0.2},
    )
    runs = []
    for settings in ({"recompute": "none"}, *checkpointing):
        with PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), 2, **mesh, **settings) as model:
            steps = [model.train_step(CHECK.batch(seed), TokenLoss()) for seed in range(2)]
            numbers = [(metrics["loss"], metrics["grad_norm"]) for metrics in steps]
            runs.append((numbers, model.infer(CHECK.batch(0), [LOGPROBS]).ragged("logprobs").values.tolist()))
    assert all(run == runs[0] for run in runs)


def test_the_rank_with_the_least_memory_decides_at_the_first_step(ranks, tmp_path):
    """The plan comes after a pass that reads, and steps are the same to the last bit."""
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    config = ModelConfig(model_name=str(folder), precision="float32", train_micro_batch_size=4)
    settings = {"gradient_accumulation": "sharded"}
    rooms, runs, decisions = [10**9, 0], [], []
    for room in rooms:
        ranks.run("dtensor_factories:show_memory", [(10**9, 2), (room, 2)])
        try:
            with PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), 2, **settings) as model:
                logprobs = model.infer(CHECK.batch(0), [LOGPROBS]).ragged("logprobs").values.tolist()
                assert ranks.run("dtensor_factories:recomputation", [(), ()]) == [["none"] * 2] * 2
                memory = ranks.run("dtensor_factories:counted", [(), ()])[1]
                metrics = model.train_step(CHECK.batch(1), TokenLoss())
                runs.append((logprobs, metrics["loss"], metrics["grad_norm"]))
                decisions.append(ranks.run("dtensor_factories:recomputation", [(), ()]))
        finally:
            ranks.run("dtensor_factories:hide_memory", [(), ()])
        if len(rooms) == 2:
            rooms.append(sum(memory.parts.values()) + memory.activations.size(RecomputePlan(1, 1)))
    assert runs[0] == runs[1] == runs[2]
    plans = ["none"] * 2, ["full"] * 2, ["full", "selective"]
    assert decisions == [[plan, plan] for plan in plans]
