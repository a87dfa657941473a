"""Arguments that vLLM is started with, by what the replica's placement says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm import AsyncEngineArgs

from rl_core.generation import Placement
from rl_core.model_config import ModelConfig
from rl_vllm import VllmConfig
from rl_vllm.arguments import engine_arguments


def started_with(folder: Path, placement: Placement, **settings: object) -> AsyncEngineArgs:
    backend, model = VllmConfig(**settings), ModelConfig(model_name=str(folder))
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
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert started_with(folder, awaiting).load_format == "auto"
    (folder / "config.json").unlink()
    assert started_with(folder, awaiting).load_format == "auto"


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
