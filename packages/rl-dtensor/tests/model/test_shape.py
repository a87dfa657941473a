"""Operations that follow from a model's shape are those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.model import ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.selfcheck import LENGTHS
from rl_dtensor.model.layers.lora import add_adapters
from rl_dtensor.model.whole import shape_of
from rl_dtensor.selfcheck import CHECK, shrink, write_tiny

FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {},
    "mistral": {"sliding_window": 4},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
CONFIGS = {family: shrink(AutoConfig.for_model(family, **fields)) for family, fields in FAMILIES.items()}
CONFIGS["gpt2"] = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=101)


def build(family):
    """A tiny model whose attention and experts are products that torch counts."""
    return AutoModelForCausalLM.from_config(
        CONFIGS[family], attn_implementation="eager", experts_implementation="eager"
    )


def counted(model, length):
    """Operations that torch counts of a step over one row, all pairs of its tokens and not only those that are seen;
    without the product of positions and frequencies, which has no gradient."""
    ids = torch.arange(length)[None] % model.config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.square().mean().backward()
    rotary = [counts for name, counts in counter.get_flop_counts().items() if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(sum(counts.values()) for counts in rotary)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_has_the_operations_that_torch_counts(family):
    model = build(family)
    shape = shape_of(model)
    length = 9
    masked = sum(
        layer.pair_flops() * (length**2 - sum(min(place + 1, layer.window or length) for place in range(length)))
        for layer in shape.attention
    )
    assert shape.training_flops([length]) + 3 * masked == counted(model, length)


def test_adapters_train_and_what_they_sit_on_does_not():
    model = build("qwen3")
    whole = shape_of(model)
    add_adapters(model, LoraConfig(enabled=True))
    adapted = shape_of(model)
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name)
    assert whole.trained == whole.matrices
    assert (adapted.matrices, adapted.trained) == (whole.matrices + added, added)


@pytest.mark.parametrize(
    "mesh", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"context_parallel_size": 2}, {}], ids=str
)
def test_a_step_reports_the_operations_of_the_whole_model(ranks, tmp_path, mesh):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    config = ModelConfig(model_name=str(folder), precision="float32")
    with PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(), 2, **mesh) as model:
        metrics = model.train_step(CHECK.batch(0), TokenLoss())
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert metrics["flops"] == shape_of(whole).training_flops(LENGTHS)
    assert metrics["flops_per_second"] > 0
    assert "mfu" not in metrics
