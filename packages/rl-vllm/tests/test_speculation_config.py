"""Settings of speculative decoding: what they give to vLLM, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from test_plugin import problems
from transformers import Qwen3Config

from rl_core.devices import CUDA
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.rollouts.generation import Placement
from rl_vllm import VllmConfig, preflight
from rl_vllm.config import SpeculationConfig
from rl_vllm.engine.arguments import AsSent, engine_arguments
from rl_vllm.plugin import PLUGIN, adapter_problem, routing_problem

NGRAM = SpeculationConfig(method="ngram")


def write_config(folder: Path, **fields: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 64, **fields}))
    return folder


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "suffix"}, r"method: got .suffix..*arctic-inference"),
        ({"method": "mtp"}, "model: is needed by method mtp"),
        ({"method": "eagle3"}, "model: is needed by method eagle3"),
        ({"method": "draft_model"}, "model: is needed by method draft_model"),
        ({"method": "ngram", "model": "drafter"}, "model: got .drafter..*is not read by method ngram"),
        ({"method": "draft_model", "model": "drafter", "prompt_lookup_max": 3}, "prompt_lookup_max.*not read"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min.*larger"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_with_its_key(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SpeculationConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: got 2.*vllm_cfg.speculation"),
        ({"sleep_level": 2, "speculation": {"method": "draft_model", "model": "near"}}, "sleep_level: got 2.*drafter"),
        ({"vllm_kwargs": {"async_scheduling": True}}, "async_scheduling"),
    ],
    ids=str,
)
def test_settings_that_exclude_speculation_are_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        VllmConfig.model_validate({"speculation": {"method": "ngram"}, **settings})
    assert VllmConfig(sleep_level=2, speculation=NGRAM).sleep_level == 2


def test_min_p_adapters_and_routing_exclude_speculation() -> None:
    config = VllmConfig(speculation=NGRAM)
    assert problems(vllm_cfg=config) == {}
    assert "another distribution" in problems(vllm_cfg=config, min_p=0.1)["generation.min_p"].reason
    model = ModelConfig(model_name="model", lora_cfg=LoraConfig(dim=4))
    assert "speculation" in adapter_problem(config, model, CUDA)
    assert "speculation" in routing_problem(config, CUDA)


@pytest.mark.parametrize(("architecture", "is_refused"), [("MambaForCausalLM", True), ("Qwen3ForCausalLM", False)])
def test_models_with_states_are_refused_before_anything_starts(
    tmp_path: Path, architecture: str, *, is_refused: bool
) -> None:
    folder = write_config(tmp_path / "model", architectures=[architecture])
    vllm_cfg = {"vllm_kwargs": {}, "speculation": NGRAM.model_dump()}
    section = {"generation": {"vllm_cfg": vllm_cfg}, "model_name": str(folder), "hf_config_overrides": {}}
    found = preflight.problems(section)
    assert any("generation.vllm_cfg.speculation: has not been verified" in each for each in found) == is_refused


def test_a_drafter_has_files_and_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    target = write_config(tmp_path / "target")

    def found(drafter: Path) -> str:
        speculation = SpeculationConfig(method="draft_model", model=str(drafter))
        problem = problems(str(target), vllm_cfg=VllmConfig(speculation=speculation))
        return "".join(each.reason for each in problem.values())

    assert not found(write_config(tmp_path / "near"))
    assert "has 65 tokens" in found(write_config(tmp_path / "other", vocab_size=65))
    assert "not a folder" in found(tmp_path / "absent")
    assert "policy's own" in found(target)


def test_a_layer_for_multi_token_prediction_is_in_the_files_of_a_verified_model(tmp_path: Path) -> None:
    def found(name: str, **fields: object) -> str:
        folder = write_config(tmp_path / name, **fields)
        speculation = SpeculationConfig(method="mtp", model=str(folder))
        problem = problems(str(folder), vllm_cfg=VllmConfig(speculation=speculation))
        return "".join(each.reason for each in problem.values())

    assert not found("with", model_type="glm4_moe", num_nextn_predict_layers=1)
    assert "lacks num_nextn_predict_layers" in found("without", model_type="glm4_moe")
    assert "not been verified" in found("other", model_type="qwen3_next", num_nextn_predict_layers=1)


@pytest.mark.parametrize(("method", "trains"), [("eagle3", True), ("mtp", True), ("draft_model", False)])
def test_heads_are_told_from_draft_models(method: Any, *, trains: bool) -> None:
    config = VllmConfig(speculation=SpeculationConfig(method=method, model="near"))
    assert (PLUGIN.draft_head(config), PLUGIN.draft_model(config)) == (("near", None) if trains else (None, "near"))


def test_vllm_gets_the_drafter_from_its_files_and_the_target_empty(tmp_path: Path) -> None:
    target, drafter = write_config(tmp_path / "target"), write_config(tmp_path / "near")

    def arguments(speculation: SpeculationConfig) -> Any:
        model = ModelConfig(model_name=str(target), hf_config_overrides={"rms_norm_eps": 0.5})
        placement = Placement("cpu", awaits_weights=True)
        backend = VllmConfig(speculation=speculation)
        return engine_arguments(backend, model, placement, max_len=8000, eager=True, extension="module.Extension")

    found = arguments(NGRAM).speculative_config
    assert found == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    with_model = arguments(SpeculationConfig(method="draft_model", model=str(drafter), num_tokens=4))
    assert with_model.speculative_config["draft_load_config"].load_format == "auto"
    assert with_model.load_format == "dummy"
    # a whole row and the place that a draft model begins with
    assert with_model.max_num_batched_tokens == 8002
    changed = with_model.hf_overrides
    assert isinstance(changed, AsSent)
    assert changed(Qwen3Config(name_or_path=str(target))).rms_norm_eps == 0.5
    assert changed(Qwen3Config(name_or_path=str(drafter))).rms_norm_eps == Qwen3Config().rms_norm_eps
