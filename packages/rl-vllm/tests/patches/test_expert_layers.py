"""Expert layers of vLLM after a weight sync."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from spoilable_generator import SpoilableGenerator
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from rl_core.model_config import GenerationConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE, write_reference_model
from rl_core.testing.torch.weight_sender import SenderProcess
from rl_core.testing.weights import Bench, model_config, prompt
from rl_vllm import EngineWorker, VllmConfig
from rl_vllm.patches.expert_layers import packs_experts

assert EngineWorker, "its module applies the corrections"


def layer_with(backend: UnquantizedMoeBackend) -> nn.Module:
    """A layer with vLLM's method, which has a kernel."""
    layer, method = nn.Module(), UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
    nn.Module.__init__(method)
    method.unquantized_backend, method.moe_kernel = backend, object()
    layer.quant_method = method
    return layer


def test_a_kernel_that_packs_is_made_anew_and_any_other_stays() -> None:
    packing, other = layer_with(UnquantizedMoeBackend.CPU), layer_with(UnquantizedMoeBackend.TRITON)
    kernel, made = other.quant_method.moe_kernel, object()
    with packs_experts(nn.ModuleList([packing, other, nn.Linear(2, 2)])):
        assert packing.quant_method.moe_kernel is None
        assert other.quant_method.moe_kernel is kernel
        packing.quant_method.moe_kernel = made
    assert packing.quant_method.moe_kernel is made


def test_a_layer_that_was_not_loaded_keeps_its_kernel() -> None:
    layer = layer_with(UnquantizedMoeBackend.CPU)
    kernel = layer.quant_method.moe_kernel
    with pytest.raises(RuntimeError, match="the transfer broke off"), packs_experts(nn.ModuleList([layer])):
        raise RuntimeError("the transfer broke off")
    assert layer.quant_method.moe_kernel is kernel


def test_vllms_method_packs_only_when_it_makes_the_kernel() -> None:
    """Once this fails, the kernel need not be made anew any longer."""
    layer, packed = layer_with(UnquantizedMoeBackend.CPU), []
    experts = SimpleNamespace(process_weights_after_loading=packed.append)
    method = layer.quant_method
    method._init_moe_kernel = lambda _: setattr(method, "moe_kernel", SimpleNamespace(fused_experts=experts))
    layer.moe_config = None
    layer.w13_weight, layer.w2_weight = (nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False) for _ in range(2))
    method.moe_kernel = None
    method._setup_kernel(layer, layer.w13_weight, layer.w2_weight)
    assert packed == [layer]
    method._setup_kernel(layer, layer.w13_weight, layer.w2_weight)
    assert packed == [layer]


def compute_experts(apply: Callable[..., None], own: range, places: torch.Tensor | None) -> torch.Tensor:
    """Compute some of eight experts for five tokens, each of which has chosen three of the eight."""
    random = torch.Generator().manual_seed(0)
    gate_up, down = (0.1 * torch.randn(size, generator=random) for size in ((8, 128, 64), (8, 64, 64)))
    hidden = torch.randn(5, 64, generator=random)
    weights, ids = torch.randn(5, 8, generator=random).softmax(-1).topk(3)
    output = torch.empty(5, 64)
    apply(
        SimpleNamespace(_use_zentorch=False, isa="vec", w1_bias=None, w2_bias=None),
        output=output,
        hidden_states=hidden,
        w1=cpu_prepack_moe_weight(gate_up[own.start : own.stop].contiguous(), "vec"),
        w2=cpu_prepack_moe_weight(down[own.start : own.stop].contiguous(), "vec"),
        topk_weights=weights,
        topk_ids=ids.int(),
        activation=MoEActivation.SILU,
        global_num_experts=8,
        expert_map=places,
        apply_router_weight_on_input=False,
        **dict.fromkeys(("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")),
    )
    return output


def test_results_of_ranks_with_their_own_experts_add_up() -> None:
    parts = []
    for own in (range(3), range(3, 8)):
        places = torch.full((8,), -1, dtype=torch.int32)
        places[own.start : own.stop] = torch.arange(len(own), dtype=torch.int32)
        parts.append(compute_experts(CPUUnquantizedExperts.apply, own, places))
    whole = compute_experts(CPUUnquantizedExperts.apply, range(8), None)
    torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-5, rtol=1e-4)


def test_vllms_kernel_takes_numbers_of_experts_for_places() -> None:
    """Once this fails, experts of other ranks need not be left out any longer."""
    apply = CPUUnquantizedExperts.apply.__wrapped__
    turned = torch.arange(8, dtype=torch.int32).flip(0)
    assert torch.equal(compute_experts(apply, range(8), turned), compute_experts(apply, range(8), None))


def write_mixture(folder: Path, seed: int, expert_size: int) -> Path:
    """A Qwen2-MoE, whose experts are as wide as given, with a tokenizer."""
    write_reference_model(folder, seed=seed)
    torch.manual_seed(seed)
    config = Qwen2MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=96,
        moe_intermediate_size=expert_size,
        shared_expert_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.15,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(folder)
    return folder


def declare_quantised(folder: Path) -> None:
    """Have the config say that the files hold 8-bit weights."""
    path = folder / "config.json"
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantisation}))


@pytest.mark.parametrize(
    ("expert_size", "placement"),
    [
        pytest.param(32, Placement("cpu"), id="packed", marks=exhaustive),
        pytest.param(
            24,
            Placement("cpu", awaits_weights=True),
            id="padded and packed, quantised in the files that it does not load",
        ),
    ],
)
def test_a_mixture_of_experts_serves_the_weights_that_it_is_sent(
    tmp_path: Path, expert_size: int, placement: Placement
) -> None:
    first, second = (write_mixture(tmp_path / str(seed), seed, expert_size) for seed in (1, 2))
    started_from = write_mixture(tmp_path / "files", 1, expert_size)
    if placement.awaits_weights:
        declare_quantised(started_from)
    config = VllmConfig(kv_cache_gib=0.25)
    sender = SenderProcess()
    try:
        generator = SpoilableGenerator(GenerationConfig(), config, model_config(started_from), placement)
        bench = Bench(generator, first, second, sender)
        try:
            if not placement.awaits_weights:
                assert_serves(bench, first)
            for folder, reloads in ((second, False), (first, True), (second, False)):
                bench.runner.run(generator.spoil("reload", reloads))
                bench.runner.run(bench.sync(folder))
                assert_serves(bench, folder)
            assert bench.runner.run(generator.spoil("loads_by_plan")) == [True]
        finally:
            bench.runner.run(generator.close())
    finally:
        sender.close()


def assert_serves(bench: Bench, folder: Path) -> None:
    """The generator's logprobs are those of a folder's model."""
    for length in (5, 40):
        found = bench.runner.run(bench.generator.score(prompt(length)))
        np.testing.assert_allclose(found, bench.references[folder].score(prompt(length)), atol=1e-3)
