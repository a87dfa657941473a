"""A step reports the operations that torch counts of the same model in one process."""

import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import adapt
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.model_worker import LENGTHS, make_batch
from rl_core.torch.training.flops import attention_shapes

ALL = LAYOUTS | EXPERT_LAYOUTS


def report(ranks, folder, layout, settings, **config):
    num_ranks, backend = ALL[layout]
    model = ModelConfig(model_name=str(folder), precision="float32", **config)
    with PooledModel(
        ranks, "megatron_factories:build", model, ModelSpec(), num_ranks, **backend, **settings
    ) as trained:
        return trained.train_step(make_batch(), TokenLoss())


def load(folder):
    """The model in one process; attention and experts are products that torch counts."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")


def counted(model):
    """Operations of a step over the rows of the batch, without those of pairs of tokens that attention masks, and of
    products of positions and frequencies."""
    layers, total = attention_shapes(model.config), 0.0
    for length in LENGTHS:
        with FlopCounterMode(display=False) as counter:
            ids = torch.arange(length)[None]
            model(ids, use_cache=False).logits.square().mean().backward()
        counts = counter.get_flop_counts()
        rotary = [sum(each.values()) for name, each in counts.items() if name.endswith(".rotary_emb")]
        seen = [sum(min(place + 1, layer.window or length) for place in range(length)) for layer in layers]
        masked = sum(3 * layer.pair_flops() * (length**2 - pairs) for layer, pairs in zip(layers, seen, strict=True))
        total += counter.get_total_flops() - sum(rotary) - masked
    return total


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("mistral", "dp2", marks=exhaustive),
        ("qwen3", "tp2 pp2+sp"),
        ("deepseek_v3", "ep2"),
        pytest.param("llama", "cp2", marks=exhaustive),
        pytest.param("qwen3", "pp2 virtual", marks=exhaustive),
        pytest.param("qwen3_moe", "tp2 ep2+sp", marks=exhaustive),
    ],
)
def test_operations_are_those_of_the_whole_model_on_every_layout(ranks, tmp_path, family, layout):
    folder = write_family(tmp_path / "model", family)
    metrics = report(ranks, folder, layout, {})
    assert metrics["flops"] == counted(load(folder))
    assert metrics["flops_per_second"] > 0
    assert "mfu" not in metrics


def test_what_is_frozen_has_no_gradient_to_compute(ranks, tmp_path):
    lora = LoraConfig(enabled=True, dim=4, alpha=8)
    dense = write_family(tmp_path / "dense", "qwen3")
    model = load(dense)
    plain = report(ranks, dense, "tp1", {})["flops"]
    adapted = report(ranks, dense, "tp1", {}, lora_cfg=lora)["flops"]
    num_tokens = sum(LENGTHS)
    matrices = sum(each.numel() for name, each in model.named_parameters() if each.dim() > 1)
    adapt(model, lora)
    added = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert adapted == plain + 2 * num_tokens * (3 * added - matrices)

    experts = write_family(tmp_path / "experts", "qwen3_moe")
    routers = sum(each.numel() for name, each in load(experts).named_parameters() if name.endswith("mlp.gate.weight"))
    frozen = report(ranks, experts, "tp1", {"freeze_moe_router": True})["flops"]
    assert frozen == report(ranks, experts, "tp1", {})["flops"] - 2 * num_tokens * routers
