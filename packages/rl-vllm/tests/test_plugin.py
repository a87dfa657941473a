from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rl_core.config import Problem, assemble
from rl_core.devices import CPU, CUDA, REHEARSAL, Device
from rl_core.model_config import GenerationConfig, LoraConfig, ModelConfig
from rl_core.plugins import GENERATORS, plugin, resolve
from rl_core.rollouts.generation import Placement
from rl_vllm import PLUGIN, VllmConfig, preflight
from rl_vllm.config import OWNED_ARGUMENTS

DEFAULTS = VllmConfig()


def problems(model_name: str = "model", device: str = "auto", **settings: object) -> dict[str, Problem]:
    vllm_cfg = settings.pop("vllm_cfg", VllmConfig())
    kind = assemble("Generation", {"vllm_cfg": VllmConfig}, base=GenerationConfig)
    generation = kind.model_validate({**settings, "vllm_cfg": vllm_cfg})
    section = SimpleNamespace(
        generation=generation, model_name=model_name, hf_config_overrides={}, max_total_sequence_length=1024
    )
    config = SimpleNamespace(cluster=SimpleNamespace(device=device))
    return {problem.key: problem for check in PLUGIN.checks for problem in check(section, config)}


def test_the_plugin_is_found_and_counts_ranks() -> None:
    assert plugin(GENERATORS, "vllm") is PLUGIN
    assert PLUGIN.ranks(VllmConfig(tensor_parallel_size=4, pipeline_parallel_size=2)) == 8


def test_engine_arguments_that_follow_from_elsewhere_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"vllm_kwargs\.dtype.*policy\.precision"):
        VllmConfig(vllm_kwargs={"dtype": "bfloat16", "block_size": 64})
    assert VllmConfig(vllm_kwargs={"block_size": 64}).vllm_kwargs == {"block_size": 64}


def test_several_ranks_cannot_share_one_process() -> None:
    with pytest.raises(ValueError, match=r"own_process: got false.*4 ranks"):
        VllmConfig(tensor_parallel_size=2, pipeline_parallel_size=2, own_process=False)
    assert VllmConfig(tensor_parallel_size=2).has_own_process(CPU)
    assert not VllmConfig().has_own_process(CPU)
    assert VllmConfig().has_own_process(CUDA)


def test_a_completion_must_leave_room_for_its_prompt() -> None:
    assert problems() == {}
    found = problems(max_new_tokens=512, vllm_cfg=VllmConfig(max_model_len=512))
    problem = found["generation.vllm_cfg.max_model_len"]
    assert problem.got == 512
    assert "max_new_tokens is 512" in problem.reason


def test_an_engine_longer_than_the_models_positions_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert problems(str(tmp_path), vllm_cfg=VllmConfig(max_model_len=1024)) == {}
    found = problems(str(tmp_path), vllm_cfg=VllmConfig(max_model_len=1025))
    problem = found["generation.vllm_cfg.max_model_len"]
    assert problem.got == 1025
    assert "1024 tokens" in problem.reason


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512}


@pytest.mark.parametrize(
    ("fields", "rope", "refused"),
    [
        ({"model_type": "phi3"}, LONGROPE, ""),
        ({"model_type": "phi3"}, {**LONGROPE, "factor": 4.0}, ""),  # the ratio of both lengths
        ({"model_type": "phi3"}, {**LONGROPE, "factor": 16.0}, "factor=16.0"),
        ({"model_type": "phi3"}, {**LONGROPE, "attention_factor": 1.5}, "attention_factor=1.5"),
        ({"model_type": "phi3"}, {**LONGROPE, "short_mscale": 1.1}, "short_mscale=1.1"),
        ({"model_type": "qwen3"}, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}, ""),
        (LATENT, {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}, ""),
        (LATENT, {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}, "mscale=0.7"),
        (LATENT, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8}, "attention_factor=0.8"),
    ],
    ids=str,
)
def test_scales_of_rotary_embeddings_that_vllm_reads_otherwise_are_problems(
    tmp_path: Path, fields: dict[str, Any], rope: dict[str, Any], refused: str
) -> None:
    config = {**fields, "max_position_embeddings": 4096, "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {key: problem for key, problem in problems(str(tmp_path)).items() if "rope_parameters" in key}
    assert bool(found) == bool(refused)
    assert all(refused in problem.reason for problem in found.values())


def test_ranks_that_do_not_divide_the_heads_of_a_model_on_this_machine_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    assert problems(str(tmp_path), vllm_cfg=VllmConfig(tensor_parallel_size=4)) == {}
    found = problems(str(tmp_path), vllm_cfg=VllmConfig(tensor_parallel_size=3))
    problem = found["generation.vllm_cfg.tensor_parallel_size"]
    assert problem.got == 3
    assert "4 attention heads" in problem.reason


def test_engines_that_share_experts_need_a_mixture(tmp_path: Path) -> None:
    engines = VllmConfig(data_parallel_size=2)
    assert problems(vllm_cfg=engines) == {}
    for name, expected in (("num_experts", []), ("num_attention_heads", ["generation.vllm_cfg.data_parallel_size"])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", name: 8}))
        assert list(problems(str(tmp_path), vllm_cfg=engines)) == expected


def test_temperatures_that_vllm_changes_or_refuses_are_problems() -> None:
    assert problems(temperature=0.01, val_temperature=0.0) == {}
    assert [(key, each.got) for key, each in problems(temperature=2.5).items()] == [("generation.temperature", 2.5)]
    assert list(problems(val_temperature=0.005)) == ["generation.val_temperature"]


def test_routing_is_reported_on_gpus_and_by_one_pipeline_rank() -> None:
    assert PLUGIN.routing_problem(VllmConfig(tensor_parallel_size=2), CUDA) == ""
    for device in (CPU, REHEARSAL):
        found = PLUGIN.routing_problem(VllmConfig(), device)
        assert f"on {device.name} " in found
        assert "Triton" in found
        assert "generation.backend=hf or megatron" in found
    split = VllmConfig(pipeline_parallel_size=2)
    assert "pipeline_parallel_size=1" in PLUGIN.routing_problem(split, CUDA)


def test_adapters_that_the_engine_cannot_apply_are_named(tmp_path: Path) -> None:
    def problem(backend: VllmConfig = DEFAULTS, device: Device = CUDA, precision: str = "bfloat16", **lora: Any) -> str:
        adapters = LoraConfig(enabled=True, **lora)
        model = ModelConfig(model_name=str(tmp_path), precision=precision, lora_cfg=adapters)
        return PLUGIN.adapter_problem(backend, model, device)

    assert problem(dim=512) == problem(precision="float32", device=CPU) == ""
    assert "dim 512" in problem(dim=513)
    assert "lora_cfg.dim asks for 513" in problem(dim=513)
    assert "lora_cfg.rank_pattern asks for 600" in problem(dim=8, rank_pattern={"q_proj": 600})
    assert "magnitudes of DoRA" in problem(use_dora=True)
    assert "sleep_level=2" in problem(VllmConfig(sleep_level=2))
    assert "policy.precision=bfloat16" in problem(precision="float32")
    assert "lora_sync=merged" in problem(target_parameters=["experts.down_proj"])
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 8}')
    some = {"match_all_linear": False, "target_modules": ["q_a_proj", "self_attn.o_proj"]}
    assert problem(**some) == problem(exclude_modules=["kv_b_proj"]) == ""
    assert "Add kv_b_proj to lora_cfg.exclude_modules" in problem()
    assert "kv_b_proj" in problem(match_all_linear=False, target_modules=["attn.kv_b_proj"])


def test_unknown_keys_and_wrong_types_are_refused() -> None:
    for settings in ({"tensor_parallel": 2}, {"tensor_parallel_size": "2"}, {"sleep_level": 3}):
        with pytest.raises(ValidationError):
            VllmConfig.model_validate(settings)


def test_preflight_names_arguments_that_the_engine_does_not_have() -> None:
    assert resolve(PLUGIN.preflight) is preflight.problems

    def check(**kwargs: object) -> list[str]:
        return preflight.problems({"generation": {"vllm_cfg": {"vllm_kwargs": kwargs}}})

    assert check() == []
    assert check(block_size=64) == []
    (found,) = check(blocksize=64)
    assert "did you mean 'block_size'" in found


def test_every_argument_of_the_engine_is_either_passed_on_or_refused_by_name(tmp_path: Path) -> None:
    from dataclasses import fields

    from vllm import AsyncEngineArgs

    from rl_vllm.engine.arguments import engine_arguments

    model = ModelConfig(model_name=str(tmp_path))
    placed = Placement("cpu")

    def started_with(backend: VllmConfig) -> AsyncEngineArgs:
        return engine_arguments(backend, model, placed, max_len=16, eager=True, extension="module.Extension")

    names = [field.name for field in fields(AsyncEngineArgs) if field.init]
    assert set(OWNED_ARGUMENTS) <= set(names)
    for name in names:
        default = getattr(started_with(VllmConfig()), name)
        if name in OWNED_ARGUMENTS:
            with pytest.raises(ValueError, match=rf"vllm_kwargs\.{name}.*cannot be set here"):
                VllmConfig(vllm_kwargs={name: default})
        else:
            assert getattr(started_with(VllmConfig(vllm_kwargs={name: default})), name) == default


def test_the_light_half_loads_no_engine() -> None:
    from rl_core.testing.isolation import light_modules_of, loaded_by

    loaded = loaded_by(*light_modules_of("rl_vllm"))
    assert not loaded & {"torch", "vllm", "ray", "transformers"}
    assert "torch" not in loaded_by("rl_vllm.generator")


def test_a_replica_on_cpu_imports_vllm_without_the_compiler() -> None:
    assert PLUGIN.preload_of(VllmConfig(), CPU).variables["TORCHDYNAMO_DISABLE"] == "1"


def test_a_replica_on_gpus_would_import_its_own_worker() -> None:
    assert "vllm.v1.worker.gpu_worker" in PLUGIN.preload_of(VllmConfig(), CUDA).modules


def test_what_has_not_been_verified_in_several_engines_is_refused() -> None:
    engines = VllmConfig(data_parallel_size=2, tensor_parallel_size=4)
    assert engines.num_ranks == PLUGIN.ranks(engines) == 8
    assert PLUGIN.follower == "rl_vllm.follower:VllmFollower"
    model = ModelConfig(model_name="x", lora_cfg=LoraConfig(enabled=True))
    for problem in (PLUGIN.adapter_problem(engines, model, CUDA), PLUGIN.routing_problem(engines, CUDA)):
        assert "data_parallel_size=1" in problem
    for name, section in {"speculation": {"method": "ngram"}, "quantization": {"method": "fp8_per_block"}}.items():
        with pytest.raises(ValidationError, match=f"must be 1 with vllm_cfg.{name}"):
            VllmConfig.model_validate({"data_parallel_size": 2, name: section})
