"""Arguments that vLLM is started with, by what the replica's placement says."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Literal

import pytest
from transformers import Gemma3Config, Qwen3Config
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform

from rl_core.errors import GeneratorError
from rl_core.model_config import GenerationConfig, LoraConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_core.testing.torch.reference_model import write_reference_model
from rl_vllm import VllmConfig
from rl_vllm.engine.arguments import AsSent, engine_arguments
from rl_vllm.generator import VllmGenerator


def started_with(
    folder: Path,
    placement: Placement,
    *,
    lora: LoraConfig | None = None,
    overrides: dict[str, object] | None = None,
    **settings: object,
) -> AsyncEngineArgs:
    backend = VllmConfig(**settings)
    model = ModelConfig(model_name=str(folder), lora_cfg=lora or LoraConfig(), hf_config_overrides=overrides or {})
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
    ("placement", "can_sleep"),
    [
        (Placement("cuda"), False),
        (Placement("cuda", shares_devices=True), True),
        (Placement("rehearsal", shares_devices=True), False),
        (Placement("cpu"), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_only_an_engine_on_shared_gpus_is_made_to_sleep_and_takes_its_graphs_and_buffers_along(
    folder: Path, placement: Placement, can_sleep: bool, num_ranks: int
) -> None:
    found = started_with(folder, placement, tensor_parallel_size=num_ranks)
    assert (found.enable_sleep_mode, found.sleep_mode_offload_cudagraph) == (can_sleep, can_sleep)
    assert found.enable_nccl_comm_suspend == (can_sleep and num_ranks > 1), "one rank has no communicators"
    kept = started_with(folder, placement, vllm_kwargs={"sleep_mode_offload_cudagraph": False})
    assert not kept.sleep_mode_offload_cudagraph


@pytest.mark.parametrize(
    ("gib", "name", "num_engines", "settings", "expected"),
    [
        (80, "NVIDIA H100 80GB HBM3", 1, {}, 16384),
        (180, "NVIDIA B200", 1, {}, 16384),
        (80, "NVIDIA A100-SXM4-80GB", 1, {}, 8192),
        (24, "NVIDIA L4", 1, {}, 8192),
        (80, "NVIDIA H100 80GB HBM3", 3, {}, 5461),
        (80, "NVIDIA H100 80GB HBM3", 1, {"max_num_seqs": 32}, 32 * 17),
        (80, "NVIDIA H100 80GB HBM3", 8, {"max_num_seqs": 4096}, 4096),
        (80, "NVIDIA H100 80GB HBM3", 1, {"max_num_batched_tokens": 3000}, 3000),
    ],
)
def test_a_pass_on_a_gpu_has_as_many_tokens_as_vllm_takes_offline_on_that_card(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    gib: int,
    name: str,
    num_engines: int,
    settings: dict[str, int],
    expected: int,
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, "get_device_total_memory", lambda: gib * 2**30)
    monkeypatch.setattr(current_platform, "get_device_name", lambda: name)
    placement = Placement("cuda", num_engines=num_engines)
    many = {"max_num_seqs": 2048, **settings}
    assert started_with(folder, placement, **many).max_num_batched_tokens == expected


def test_several_engines_in_one_process_are_refused(folder: Path) -> None:
    model, backend = ModelConfig(model_name=str(folder)), VllmConfig(own_process=False)
    generator = VllmGenerator(GenerationConfig(), backend, model, Placement("cpu", num_engines=2))
    with pytest.raises(GeneratorError, match="own_process=false"):
        asyncio.run(generator.start())


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


def test_an_engine_computes_with_dequantised_weights_if_they_will_be_sent(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    awaiting = Placement("cuda", awaits_weights=True)
    assert started_with(folder, awaiting).hf_overrides == AsSent({})
    assert started_with(folder, awaiting).load_format == "dummy"
    quantised = started_with(folder, awaiting, quantization={"method": "fp8_per_channel"})
    assert quantised.hf_overrides == AsSent({}), "what the engine quantises itself, it makes of what is sent"
    assert started_with(folder, awaiting, kv_cache_dtype="fp8").hf_overrides == {}
    assert started_with(folder, Placement("cuda")).hf_overrides == {}


def test_a_config_as_sent_has_no_quantisation_and_the_other_fields_that_are_set() -> None:
    config = Qwen3Config(quantization_config={"quant_method": "mxfp4"}, rms_norm_eps=0.1)
    found = pickle.loads(pickle.dumps(AsSent({"eos_token_id": 7, "head_dim": 24})))(config)
    assert not hasattr(found, "quantization_config")
    assert (found.eos_token_id, found.head_dim, found.rms_norm_eps) == (7, 24, 0.1)


def test_of_a_composite_model_the_language_model_is_sent() -> None:
    config = Gemma3Config(quantization_config={"quant_method": "mxfp4"}, text_config={"rms_norm_eps": 0.1})
    config.text_config.quantization_config = {"quant_method": "mxfp4"}
    found = pickle.loads(pickle.dumps(AsSent({"eos_token_id": 7, "head_dim": 24})))(config)
    assert (found.model_type, found.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert not hasattr(found, "quantization_config")
    assert (found.eos_token_id, found.head_dim, found.rms_norm_eps) == (7, 24, 0.1)


def test_an_engine_that_reads_a_composite_model_has_overrides_in_its_text(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"head_dim": 8}}))
    found = started_with(folder, Placement("cuda"), overrides={"head_dim": 16})
    assert found.hf_overrides == {"text_config": {"head_dim": 16}}
    assert found.language_model_only
    assert started_with(folder, Placement("cuda", awaits_weights=True), overrides={"head_dim": 16}).hf_overrides == (
        AsSent({"head_dim": 16})
    )


@pytest.mark.parametrize("stated", [{}, {"attn_temperature_tuning": False}])
def test_the_temperature_of_llama_4_is_that_of_its_config(folder: Path, stated: dict[str, bool]) -> None:
    """By itself vLLM decides by the longest row that it may serve."""
    text = {"model_type": "llama4_text", **stated}
    for config in (text, {"model_type": "llama4", "text_config": text}):
        (folder / "config.json").write_text(json.dumps(config))
        found = started_with(folder, Placement("cuda"))
        assert found.override_generation_config == {"attn_temperature_tuning": not stated}
    overridden = started_with(folder, Placement("cuda"), overrides={"attn_temperature_tuning": False})
    assert overridden.override_generation_config == {"attn_temperature_tuning": False}


def test_windows_of_cohere_are_those_of_the_policy(folder: Path) -> None:
    """vLLM adds one to them."""
    text = {"model_type": "cohere2", "sliding_window": 64}
    (folder / "config.json").write_text(json.dumps(text))
    awaiting = Placement("cuda", awaits_weights=True)
    assert started_with(folder, awaiting).hf_overrides == AsSent({"sliding_window": 63})
    assert started_with(folder, Placement("cuda"), overrides={"sliding_window": 32}).hf_overrides == {
        "sliding_window": 31
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "cohere2_vision", "text_config": text}))
    assert started_with(folder, Placement("cuda")).hf_overrides == {"text_config": {"sliding_window": 63}}
    (folder / "config.json").write_text(json.dumps({"model_type": "cohere2"}))
    assert started_with(folder, awaiting).hf_overrides == AsSent({"sliding_window": 4095})


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


@pytest.mark.parametrize(
    ("precision", "device", "fields", "backend"),
    [
        ("float32", "cpu", {"kv_lora_rank": 512}, "CPU_MLA"),
        ("bfloat16", "cpu", {"kv_lora_rank": 512}, "CPU_MLA"),
        ("float32", "cuda", {"kv_lora_rank": 512}, None),
        ("float32", "cpu", {}, None),
    ],
)
def test_latent_attention_on_cpu_takes_the_backend_that_keeps_its_weights(
    folder: Path, precision: Literal["float32", "bfloat16"], device: str, fields: dict[str, int], backend: str | None
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **fields}))
    model = ModelConfig(model_name=str(folder), precision=precision)
    found = engine_arguments(
        VllmConfig(), model, Placement(device), max_len=16, eager=True, extension="module.Extension"
    )
    assert found.attention_backend == backend


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
    mixed = some.model_copy(update={"rank_pattern": {"q_proj": 20}})
    assert started_with(folder, Placement("cuda"), lora=mixed).max_lora_rank == 32
    assert not started_with(folder, Placement("cuda")).enable_lora
