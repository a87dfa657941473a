"""Layers are recomputed as the memory of a device demands."""

import logging
from types import SimpleNamespace

import pytest
import torch
from ledger.shapes import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.facts.model_size import size_of_fields
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.torch.training.recompute import LayerActivations, RecomputePlan, smallest_plan
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.recompute import RankParameters, plans_of, recompute_plan
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.sizes import AxisSizes
from rl_dtensor.plugin import PLUGIN

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
}


def on_meta(family, **fields):
    config = AutoConfig.for_model(family, **{**SIZES, **fields})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ROWS)


LAYERS = [LayerActivations(none=10, selective=4, full=1)] * 4


@pytest.mark.parametrize(
    ("room", "plan"),
    [
        (400, RecomputePlan()),
        (399, RecomputePlan(0, 2)),
        (260, RecomputePlan(0, 4)),
        (259, RecomputePlan(1, 3)),
        (140, RecomputePlan(4, 0)),
        (0, RecomputePlan(4, 0)),
    ],
)
def test_no_more_is_recomputed_than_must_be(room, plan):
    assert smallest_plan(plans_of(4), LAYERS, 10, room) == plan


@pytest.fixture
def alone():
    """A group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def planned(capacity, hf=None, tokens=1000, **settings):
    hf = on_meta("llama") if hf is None else hf
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=tokens)
    config = ModelConfig(model_name="m", max_total_sequence_length=100, logprob_chunk_size=10, sequence_packing=packing)
    backend = DTensorConfig(**settings)
    sizes = AxisSizes.of(backend, backend.pipeline_parallel_size)
    mesh = SimpleNamespace(kind=SimpleNamespace(capacity_bytes=capacity), control=None, rank=0, sizes=sizes)
    return recompute_plan(config, backend, hf, decoder_layers(hf), mesh=mesh, trains_all=True)


def test_a_device_with_room_recomputes_nothing_and_a_small_one_everything(alone, caplog):
    caplog.set_level(logging.INFO)
    assert planned(10**9) == planned(None) == RecomputePlan()
    assert "recompute=auto recomputes no layer" in caplog.text
    small = planned(10**6)
    assert small == RecomputePlan(2, 0)
    assert "recompute=auto recomputes 2 in full of 2 layers" in caplog.text

    assert planned(10**6, recompute="none") == RecomputePlan()
    assert planned(None, recompute="full") == RecomputePlan(num_full=2)
    assert planned(None, recompute="selective") == RecomputePlan(num_selective=2)


def test_a_pipeline_keeps_activations_of_several_microbatches(alone):
    """A stage has half of the layers and of the state, and twice the microbatches."""
    sizes = range(10**6, 6 * 10**6, 2 * 10**5)
    needed = next(capacity for capacity in sizes if planned(capacity) == RecomputePlan())
    assert planned(needed, tokens=2000) != RecomputePlan()
    assert planned(needed, pipeline_parallel_size=2) == RecomputePlan()
    assert planned(needed, tokens=2000, pipeline_parallel_size=2) != RecomputePlan()


def test_a_model_that_needs_data_is_recomputed_whole(alone, caplog):
    caplog.set_level(logging.INFO)
    hf = on_meta("llama")
    hf.model.layers[1].mlp.register_forward_pre_hook(lambda *_: torch.zeros(1, device="meta").item())
    assert planned(10**9, hf) == RecomputePlan(num_full=2)
    assert "their activations cannot be counted (RuntimeError: Tensor.item()" in caplog.text


@pytest.mark.parametrize("name", ["Llama-70B", "Qwen3-30B-A3B", "Qwen3-8B"])
@pytest.mark.parametrize("world", [32, 64])
def test_the_driver_counts_a_rank_as_its_worker_does(name, world):
    config = config_of(name)
    config.num_hidden_layers = 4
    config._attn_implementation = ROWS
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    size = size_of_fields(config.to_dict())
    assert size.count == pytest.approx(sum(each.numel() for each in hf.parameters()), rel=1e-3)
    backend = DTensorConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    sizes = AxisSizes.of(backend, world)
    here = RankParameters.of(hf, decoder_layers(hf), config.num_hidden_layers // 2, sizes)
    found = PLUGIN.memory(ModelConfig(model_name=name), backend, size, world, trains=True)
    assert found.device == pytest.approx(16 * here.sharded, rel=1e-3)
    assert found.kept == pytest.approx(12 * here.sharded, rel=1e-3)
