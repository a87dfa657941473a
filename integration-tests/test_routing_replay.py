"""Mixtures of experts whose trainer sends tokens to the experts that the generator chose."""

import numpy as np
import pytest
from runs import steps_of
from safetensors.numpy import save_file
from transformers import Qwen3MoeConfig

from rl_algos.tiny_model import make_tokenizer
from rl_core.testing.exhaustive import exhaustive

ESTIMATOR = '''
import numpy as np


def alternating(rewards, groups):
    """An untrained model earns nothing."""
    return np.where(np.arange(len(rewards)) % 2, 1.0, -1.0)
'''
DTENSOR = ("policy.dtensor_cfg.moe_router_replay=true", "policy.dtensor_cfg.expert_parallel_size=2")
MEGATRON = (
    "policy.megatron_cfg.enabled=true",
    "policy.megatron_cfg.moe_router_replay=true",
    "policy.megatron_cfg.expert_model_parallel_size=2",
)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A tiny mixture of experts that knows nothing."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    save_file(weights_of(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights_of(config):
    """Random weights by the names of the hub's files, made without an engine."""
    size, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    key_values = config.num_key_value_heads * config.head_dim
    shapes = {"model.embed_tokens": (config.vocab_size, size)}
    norms = {"model.norm": size}
    for layer in (f"model.layers.{number}" for number in range(config.num_hidden_layers)):
        shapes |= {f"{layer}.self_attn.q_proj": (heads, size), f"{layer}.self_attn.o_proj": (size, heads)}
        shapes |= {f"{layer}.self_attn.{name}_proj": (key_values, size) for name in "kv"}
        shapes[f"{layer}.mlp.gate"] = (config.num_experts, size)
        for expert in (f"{layer}.mlp.experts.{number}" for number in range(config.num_experts)):
            shapes |= {f"{expert}.{name}_proj": (config.moe_intermediate_size, size) for name in ("gate", "up")}
            shapes[f"{expert}.down_proj"] = (size, config.moe_intermediate_size)
        norms |= {f"{layer}.{name}_layernorm": size for name in ("input", "post_attention")}
        norms |= {f"{layer}.self_attn.{name}_norm": config.head_dim for name in "qk"}
    draw = np.random.default_rng(0)
    weights = {name: (0.2 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    weights |= {name: np.ones(length, np.float32) for name, length in norms.items()}
    return {f"{name}.weight": values for name, values in weights.items()}


@pytest.mark.parametrize(
    ("backend", "generator", "is_packed"),
    [
        pytest.param(DTENSOR, "hf", True, id="dtensor hf packed", marks=exhaustive),
        pytest.param(MEGATRON, "megatron", True, id="megatron megatron packed", marks=exhaustive),
        pytest.param(MEGATRON, "hf", False, id="megatron hf padded", marks=exhaustive),
    ],
)
def test_a_mixture_of_experts_trains_on_the_routing_of_its_generator(
    driver, mixture, tmp_path, backend, generator, is_packed
):
    (tmp_path / "mine.py").write_text(ESTIMATOR)
    driver.train(
        tmp_path / "run",
        "grpo-arithmetic",
        f"policy.model_name={mixture}",
        f"policy.generation.backend={generator}",
        f"policy.sequence_packing.enabled={str(is_packed).lower()}",
        *backend,
        f"grpo.adv_estimator.name={tmp_path / 'mine.py'}:alternating",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=4",
        "grpo.val_period=0",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=8",
        "checkpointing.metric_name=null",
    )
    steps = steps_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert max(line["mismatch/max"] for line in steps) < 1e-3
