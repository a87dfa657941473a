"""Settings of quantised rollouts: what they give to vLLM, and what they refuse."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rl_core.devices import CUDA
from rl_core.errors import GeneratorError
from rl_core.model_config import GenerationConfig, LoraConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_vllm import VllmConfig, VllmGenerator, preflight
from rl_vllm.config import ROUTERS, QuantizationConfig
from rl_vllm.engine import quantisation_kernels
from rl_vllm.engine.arguments import engine_arguments
from rl_vllm.plugin import PLUGIN, adapter_problem

PER_CHANNEL = QuantizationConfig(method="fp8_per_channel")


def write_config(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 4, **fields}))
    return folder


def problems(folder: Path, quantization: QuantizationConfig, precision: str = "bfloat16") -> dict[str, Any]:
    generation = SimpleNamespace(vllm_cfg=VllmConfig(quantization=quantization), **GenerationConfig().model_dump())
    section = SimpleNamespace(
        generation=generation,
        model_name=str(folder),
        hf_config_overrides={},
        precision=precision,
        max_total_sequence_length=64,
    )
    config = SimpleNamespace(cluster=SimpleNamespace(device="auto"))
    return {problem.key: problem for check in PLUGIN.checks for problem in check(section, config)}


@pytest.mark.parametrize("argument", ["quantization", "quantization_config"])
def test_quantisation_is_set_by_its_own_section(argument: str) -> None:
    with pytest.raises(ValidationError, match=r"set here.*Set `vllm_cfg\.quantization`"):
        VllmConfig(vllm_kwargs={argument: "fp8"})


@pytest.mark.parametrize(("method", "reason"), [("mxfp8", "could not be verified"), ("nvfp4", "only to experts")])
def test_methods_whose_sync_cannot_be_verified_are_refused(method: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=rf"method: got .{method}.*{reason}"):
        QuantizationConfig(method=method)


def test_a_drafter_is_not_quantised_along() -> None:
    speculation = {"method": "draft_model", "model": "near"}
    with pytest.raises(ValidationError, match=r"quantization: got .fp8_per_channel.*drafter"):
        VllmConfig.model_validate({"quantization": PER_CHANNEL, "speculation": speculation})
    assert VllmConfig.model_validate({"quantization": PER_CHANNEL, "speculation": {"method": "ngram"}}).speculation


@pytest.mark.parametrize(
    ("settings", "reduced"),
    [
        ({}, ""),
        ({"kv_cache_dtype": "bfloat16"}, ""),
        ({"kv_cache_dtype": "fp8"}, "vllm_cfg.kv_cache_dtype=fp8"),
        ({"quantization": PER_CHANNEL}, "vllm_cfg.quantization.method=fp8_per_channel"),
    ],
)
def test_settings_that_compute_in_fewer_bits_say_so(settings: dict[str, Any], reduced: str) -> None:
    assert VllmConfig(**settings).reduced_precision == reduced


def test_weights_in_float32_and_models_without_a_layer_to_quantise_are_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    assert problems(folder, PER_CHANNEL) == {}
    found = problems(folder, PER_CHANNEL, precision="float32")
    assert "policy.precision is float32" in found["generation.vllm_cfg.quantization.method"].reason
    all_kept = PER_CHANNEL.model_copy(update={"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 3})
    (problem,) = problems(folder, all_kept).values()
    assert "none of the model's 4 layers" in problem.reason


def test_adapters_exclude_quantised_weights() -> None:
    model = ModelConfig(model_name="model", lora_cfg=LoraConfig(dim=4))
    assert "quantised weights" in adapter_problem(VllmConfig(quantization=PER_CHANNEL), model, CUDA)


def test_vllm_gets_the_method_and_the_layers_that_keep_their_precision(tmp_path: Path) -> None:
    settings = {"num_first_layers_in_bf16": 1, "num_last_layers_in_bf16": 2, "ignored_layers": ["*.o_proj"]}
    backend = VllmConfig(quantization=QuantizationConfig(method="fp8_per_block", **settings))
    model, placement = ModelConfig(model_name=str(write_config(tmp_path))), Placement("cpu", awaits_weights=True)
    found = engine_arguments(backend, model, placement, max_len=16, eager=True, extension="module.Extension")
    assert found.quantization == "online"
    args = found.quantization_config
    assert args.moe is None
    assert str(args.linear) == "fp8_per_block_static"
    assert args.ignore == [*ROUTERS, "*layers.0.*", "*layers.2.*", "*layers.3.*", "*.o_proj"]
    assert found.load_format == "dummy", "scales are made of the weights that are sent"


def test_what_this_machine_has_no_kernels_for_is_refused_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"fp8_per_channel": "", "fp8_per_block": "no kernel", "fp8_per_tensor": "no kernel"}
    monkeypatch.setattr(quantisation_kernels, "_method_problem", reasons.__getitem__)
    monkeypatch.setattr(quantisation_kernels, "_cache_problem", lambda: "on CPUs it needs AVX-512 or AMX")
    vllm_cfg = {"vllm_kwargs": {}, "quantization": {"method": "fp8_per_block"}, "kv_cache_dtype": "fp8"}
    found = preflight.problems({"generation": {"vllm_cfg": vllm_cfg}})
    assert found[0].startswith("generation.vllm_cfg.quantization.method: fp8_per_block does not run on this machine")
    assert found[0].endswith("Set it to fp8_per_channel")
    assert "kv_cache_dtype: fp8" in found[1]
    assert preflight.problems({"generation": {"vllm_cfg": {**vllm_cfg, "quantization": None}}}) == found[1:]
    backend = VllmConfig(quantization=QuantizationConfig(method="fp8_per_block"), kv_cache_dtype="fp8")
    generator = VllmGenerator(GenerationConfig(), backend, ModelConfig(model_name="model"), Placement("cpu"))
    with pytest.raises(GeneratorError, match=r"vllm_cfg\.quantization\.method.*Set it to.*; vllm_cfg\.kv_cache_dtype"):
        asyncio.run(generator.start())


def test_kernels_are_found_by_trying_them() -> None:
    """Per channel runs wherever torch multiplies in 8 bits, which is every CPU; what else runs depends on it."""
    assert quantisation_kernels.quantisation_problems(PER_CHANNEL, "auto") == []
    for method in ("fp8_per_block", "fp8_per_tensor"):
        for problem in quantisation_kernels.quantisation_problems(QuantizationConfig(method=method), "auto"):
            assert problem.startswith(f"quantization.method: {method} does not run on this machine: ")
            assert "fp8_per_channel" in problem
