"""Layers are recomputed as the memory of a device demands."""

import logging
from types import SimpleNamespace

import pytest
import torch
from ledger.shapes import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.facts.model_size import size_of_fields, trained_size
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.torch.optim.parameters import frozen_names
from rl_core.torch.training.recompute import RecomputePlan
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.recompute import CountedMemory, RankParameters
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


def counted(hf=None, tokens=1000, **settings):
    hf = on_meta("llama") if hf is None else hf
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=tokens)
    config = ModelConfig(model_name="m", max_total_sequence_length=100, logprob_chunk_size=10, sequence_packing=packing)
    backend = DTensorConfig(**settings)
    mesh = SimpleNamespace(rank=0, sizes=AxisSizes.of(backend, backend.pipeline_parallel_size))
    return CountedMemory.of(config, backend, hf, decoder_layers(hf), mesh=mesh, trained=set(hf.parameters()))


def planned(room, *args, **settings):
    return counted(*args, **settings).plan(room, keeps_whole=False)[0]


def test_a_device_with_room_recomputes_nothing_and_a_small_one_everything():
    recompute, _, plan = counted().plan(10**9, keeps_whole=False)
    assert recompute == RecomputePlan()
    assert plan.decision.startswith("dtensor_cfg.recompute=auto: no layer recomputed: activations of 1.0 microbatches")
    recompute, keeps_gathered, plan = counted().plan(10**6, keeps_whole=False)
    assert (recompute, keeps_gathered) == (RecomputePlan(2, 0), False)
    assert "2 in full of 2 layers recomputed" in plan.decision

    assert planned(10**6, recompute="none") == RecomputePlan()
    assert planned(10**9, recompute="full") == RecomputePlan(num_full=2)
    assert planned(10**9, recompute="selective") == RecomputePlan(num_selective=2)


def test_a_plan_takes_no_more_than_it_is_given():
    memory = counted()
    full = planned(0)
    sizes = set()
    for room in range(10**6, 4 * 10**6, 10**4):
        recompute, _, plan = memory.plan(room, keeps_whole=True)
        if recompute != full:
            assert sum(plan.parts.values()) <= room
            sizes.add(sum(plan.parts.values()))
    assert len(sizes) >= 3
    assert plan.parts["whole gradients"] == plan.parts["weights"]


def test_a_pipeline_keeps_activations_of_several_microbatches():
    """A stage has half of the layers and of the state, and twice the microbatches."""
    needed = next(room for room in range(10**6, 6 * 10**6, 2 * 10**5) if planned(room) == RecomputePlan())
    assert planned(needed, tokens=2000) != RecomputePlan()
    assert planned(needed, pipeline_parallel_size=2) == RecomputePlan()
    assert planned(needed, tokens=2000, pipeline_parallel_size=2) != RecomputePlan()


def test_a_model_that_needs_data_is_recomputed_whole(caplog):
    caplog.set_level(logging.INFO)
    hf = on_meta("llama")
    hf.model.layers[1].mlp.register_forward_pre_hook(lambda *_: torch.zeros(1, device="meta").item())
    recompute, keeps_gathered, plan = counted(hf).plan(10**9, keeps_whole=False)
    assert (recompute, keeps_gathered) == (RecomputePlan(num_full=2), False)
    assert "activations" not in plan.parts
    assert "their activations cannot be counted (RuntimeError: Tensor.item()" in caplog.text


def test_parameters_stay_gathered_if_that_recomputes_no_more():
    hf = on_meta("llama")
    gathered = 2 * sum(parameter.numel() for parameter in hf.parameters())
    memory = counted(hf)
    plans = {room: memory.plan(room, keeps_whole=False) for room in range(10**6, 4 * 10**6, 10**4)}
    first = min(room for room, (recompute, _, _) in plans.items() if recompute == RecomputePlan())
    kept = min(room for room, (recompute, keeps, _) in plans.items() if keeps and recompute == RecomputePlan())
    assert abs(kept - first - gathered) <= 10**4
    assert plans[kept][2].parts["parameters that stay gathered"] == gathered
    assert not plans[10**6][1]  # Nothing fits.
    # The choice of a user decides, and leaves less room for activations.
    by_hand = counted(hf, reshard_after="step").plan(first, keeps_whole=False)
    assert by_hand[0] != RecomputePlan()
    assert by_hand[1]
    assert not counted(hf, reshard_after="layer").plan(10**9, keeps_whole=False)[1]
    # So does one that fixes recomputation.
    fixed = counted(hf, recompute="none")
    assert [fixed.plan(room, keeps_whole=False)[1] for room in (kept - 10**4, kept)] == [False, True]


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
    here = RankParameters.of(hf, decoder_layers(hf), config.num_hidden_layers // 2, sizes, set(hf.parameters()))
    found = PLUGIN.memory(ModelConfig(model_name=name), backend, size, world, trained=size)
    assert found.device == pytest.approx(16 * here.sharded, rel=1e-3)
    assert found.kept == pytest.approx(12 * here.sharded, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torch.optim.Muon", "rl_core.torch.EightBitAdamW"])
@pytest.mark.parametrize(
    "patterns",
    [{}, {"freeze": ["model.embed_tokens", "model.layers.0", "*.q_proj"]}, {"train_only": ["*layers.3", "lm_head"]}],
    ids=str,
)
@pytest.mark.parametrize("name", ["Llama-70B", "Qwen3-30B-A3B"])
def test_the_driver_counts_what_trains_and_its_state_as_a_worker_does(name, patterns, optimizer):
    config = config_of(name)
    config.num_hidden_layers = 4
    config._attn_implementation = ROWS
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = ModelConfig(model_name=name, optimizer={"name": optimizer, "kwargs": {}}, **patterns)
    frozen = frozen_names(model, [each for each, _ in hf.named_parameters()])
    trained = {parameter for each, parameter in hf.named_parameters() if each not in frozen}
    backend = DTensorConfig()
    here = RankParameters.of(hf, decoder_layers(hf), config.num_hidden_layers, AxisSizes.of(backend, 8), trained)
    size = size_of_fields(config.to_dict())
    found = PLUGIN.memory(model, backend, size, 8, trained=trained_size(model, config.to_dict(), size))
    parts = here.bytes_besides(model, backend)
    assert found.device == pytest.approx(
        sum(parts[each] for each in ("weights", "gradients", "optimizer state")), rel=1e-3
    )
    assert found.weights == pytest.approx(4 * here.trained, rel=1e-3)
