"""Arguments that vLLM is started with, by what the replica's placement says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import Gemma3Config
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig as EngineConfig
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from rl_core.generation import Placement
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.testing.torch.reference_model import write_reference_model
from rl_vllm import VllmConfig
from rl_vllm.arguments import Dequantised, engine_arguments


def started_with(
    folder: Path, placement: Placement, *, lora: LoraConfig | None = None, **settings: object
) -> AsyncEngineArgs:
    backend, model = VllmConfig(**settings), ModelConfig(model_name=str(folder), lora_cfg=lora or LoraConfig())
    if lora is not None:
        return engine_arguments(
            backend, model, placement, max_len=16, eager=True, extension="module.Extension", applies_adapters=True
        )
    return engine_arguments(backend, model, placement, max_len=16, eager=True, extension="module.Extension")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


@pytest.mark.parametrize(
    ("placement", "can_sleep", "utilization"),
    [
        (Placement("cuda"), False, 0.9),
        (Placement("cuda", shares_devices=True), True, 0.6),
        (Placement("rehearsal", shares_devices=True), False, 0.6),
        (Placement("cpu"), False, 0.9),
    ],
    ids=str,
)
def test_only_an_engine_on_shared_gpus_is_made_to_sleep(
    folder: Path, placement: Placement, can_sleep: bool, utilization: float
) -> None:
    found = started_with(folder, placement)
    assert (found.enable_sleep_mode, found.gpu_memory_utilization) == (can_sleep, utilization)
    assert started_with(folder, placement, gpu_memory_utilization=0.4).gpu_memory_utilization == 0.4


def test_the_engine_returns_routing_if_it_is_to_be_reported(folder: Path) -> None:
    assert started_with(folder, Placement("cuda", reports_routing=True)).enable_return_routed_experts
    assert not started_with(folder, Placement("cuda")).enable_return_routed_experts


def test_weights_that_will_be_sent_are_not_loaded(folder: Path) -> None:
    awaiting = Placement("cuda", awaits_weights=True)
    assert started_with(folder, awaiting).load_format == "dummy"
    assert started_with(folder, Placement("cuda")).load_format == "auto"
    assert started_with(folder, awaiting, vllm_kwargs={"load_format": "runai_streamer"}).load_format == "runai_streamer"


def test_weights_are_loaded_if_some_of_them_come_from_the_files_alone(folder: Path) -> None:
    awaiting = Placement("cuda", awaits_weights=True)
    assert started_with(folder, awaiting, kv_cache_dtype="fp8").load_format == "auto"
    assert started_with(folder, awaiting, vllm_kwargs={"quantization": "fp8"}).load_format == "auto"


def test_an_engine_computes_with_dequantised_weights_if_they_will_be_sent(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    awaiting = Placement("cuda", awaits_weights=True)
    assert started_with(folder, awaiting).hf_overrides == Dequantised({})
    assert started_with(folder, awaiting).load_format == "dummy"
    assert started_with(folder, awaiting, vllm_kwargs={"quantization": "fp8"}).hf_overrides == {}
    assert started_with(folder, Placement("cuda")).hf_overrides == {}


def test_a_dequantised_config_has_no_quantisation_and_the_other_fields_that_are_set() -> None:
    config = Gemma3Config(quantization_config={"quant_method": "mxfp4"}, text_config={"rms_norm_eps": 0.1})
    config.text_config.quantization_config = {"quant_method": "mxfp4"}
    change = pickle.loads(pickle.dumps(Dequantised({"eos_token_id": 7, "text_config": {"head_dim": 24}})))
    found = change(config)
    assert not hasattr(found, "quantization_config")
    assert not hasattr(found.text_config, "quantization_config")
    assert (found.eos_token_id, found.text_config.head_dim, found.text_config.rms_norm_eps) == (7, 24, 0.1)


@pytest.mark.parametrize(
    ("architecture", "device", "caches"),
    [
        ("JambaForCausalLM", "cpu", False),
        ("JambaForCausalLM", "cuda", None),
        ("Qwen3ForCausalLM", "cpu", None),
        ("NonesuchForCausalLM", "cpu", None),
    ],
)
def test_prefixes_of_states_are_not_cached_on_cpu(
    folder: Path, architecture: str, device: str, caches: bool | None
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "any", "architectures": [architecture]}))
    assert started_with(folder, Placement(device)).enable_prefix_caching is caches


@pytest.mark.parametrize(("device", "operations"), [("cpu", ["-rotary_embedding"]), ("cuda", [])])
def test_rotary_embeddings_of_latent_attention_leave_out_the_kernel_of_cpus(
    folder: Path, device: str, operations: list[str]
) -> None:
    assert started_with(folder, Placement(device)).compilation_config.custom_ops == []
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "kv_lora_rank": 512}))
    assert started_with(folder, Placement(device)).compilation_config.custom_ops == operations


def test_vllms_kernel_of_rotary_embeddings_on_cpu_is_wrong_for_heads_in_a_dimension_of_their_own() -> None:
    """Once this fails, the kernel need not be left out any longer."""
    torch.manual_seed(0)
    with set_current_vllm_config(EngineConfig()):
        rotary = RotaryEmbedding(64, 64, 16, 10000.0, False, torch.float32)
    places, query, key = torch.arange(5), torch.randn(5, 4, 64), torch.randn(5, 1, 64)
    expected, _ = rotary.forward_native(places, query.clone(), key.clone())
    found, _ = rotary.forward_cpu(places, query.clone(), key.clone())
    assert not torch.allclose(found, expected, atol=0.1)
    flat, _ = rotary.forward_cpu(places, query.flatten(1), key.flatten(1))
    torch.testing.assert_close(flat.view_as(query), expected)


def test_an_engine_that_applies_adapters_has_room_for_those_of_one_version(tmp_path: Path) -> None:
    folder = write_reference_model(tmp_path, seed=1)
    found = started_with(
        folder, Placement("cuda"), lora=LoraConfig(enabled=True, dim=9, exclude_modules=["mlp.up_proj"])
    )
    assert (found.enable_lora, found.max_loras, found.max_cpu_loras, found.max_lora_rank) == (True, 1, 1, 16)
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert found.lora_target_modules == layers, "neither embeddings nor the head"
    some = LoraConfig(enabled=True, dim=8, match_all_linear=False, target_modules=["q_proj", "self_attn.o_proj"])
    found = started_with(folder, Placement("cuda"), lora=some)
    assert (found.max_lora_rank, found.lora_target_modules) == (8, ["o_proj", "q_proj"])
    assert not started_with(folder, Placement("cuda")).enable_lora
