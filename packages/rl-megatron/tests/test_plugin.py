"""A config that cannot run is refused by the driver, naming its key."""

import json
from types import SimpleNamespace
from typing import get_args

import pytest

from rl_core.facts.model_size import ModelSize
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.testing.isolation import fork_problem
from rl_megatron.config import Fp8Config, MegatronConfig
from rl_megatron.plugin import PLUGIN, num_ranks


def problems(policy=None, device="cpu", **settings):
    model = policy or ModelConfig(model_name="model")
    fields = {name: getattr(model, name) for name in ModelConfig.model_fields}
    section = SimpleNamespace(**fields, megatron_cfg=MegatronConfig(**settings))
    config = SimpleNamespace(cluster=SimpleNamespace(device=device))
    return {problem.key: problem for check in PLUGIN.checks for problem in check(section, config)}


def test_defaults_have_no_problems():
    assert problems() == {}


@pytest.mark.parametrize(
    ("name", "kwargs", "key"),
    [
        ("torch.optim.Adafactor", {}, "optimizer.name"),
        ("rl_core.torch.EightBitAdamW", {}, "optimizer.name"),
        ("torch.optim.AdamW", {"differentiable": True}, "optimizer.kwargs.differentiable"),
        ("torch.optim.AdamW", {"capturable": True}, "optimizer.kwargs.capturable"),
    ],
)
def test_an_optimizer_that_cannot_step_parts_of_parameters_is_refused(name, kwargs, key):
    optimizer = OptimizerConfig(name=name, kwargs=kwargs)
    assert list(problems(ModelConfig(model_name="model", optimizer=optimizer))) == [key]


@pytest.mark.parametrize(
    ("settings", "key", "mention"),
    [
        ({"sequence_parallel": True}, "sequence_parallel", ".tensor_model_parallel_size=2"),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size",
            ".pipeline_model_parallel_size=2",
        ),
        (
            {"num_layers_in_first_pipeline_stage": 2},
            "num_layers_in_first_pipeline_stage",
            ".pipeline_model_parallel_size=2",
        ),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, "sequence_parallel", "true"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size", "expert_model_parallel_size above 1"),
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff", "moe_router_load_balancing_type, which is none"),
        ({"fp8_cfg": {"enabled": True}}, "fp8_cfg.enabled", "cluster.device is cpu"),
        ({"transformer_engine": True}, "transformer_engine", "cluster.device is cpu"),
        ({"moe_per_layer_logging": True}, "moe_per_layer_logging", "moe_router_load_balancing_type"),
        ({"recompute": "full", "recompute_modules": ["mlp"]}, "recompute_modules", "=full"),
        ({"recompute_modules": ["mlp", "moe_act"]}, "recompute_modules", "Remove moe_act"),
        ({"recompute": "none", "recompute_modules": ["mlp"]}, "recompute_modules", "recompute=selective"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, key, mention):
    problem = problems(**settings)[f"megatron_cfg.{key}"]
    assert mention in f"{problem.reason}. {problem.remedy}"
    assert problem.is_unused == (key == "moe_per_layer_logging" or "recompute" in settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"use_dora": True}, "use_dora"),
        ({"max_adapters": 2}, "max_adapters"),
        ({"base_quantization": "nf4"}, "base_quantization"),
    ],
)
def test_adapters_that_only_the_other_backend_has_are_refused(settings, key):
    lora = LoraConfig(enabled=True, **settings)
    (problem,) = problems(ModelConfig(model_name="model", lora_cfg=lora)).values()
    assert problem.key == f"lora_cfg.{key}"
    assert "train with dtensor_cfg instead of megatron_cfg" in problem.remedy
    assert problems(ModelConfig(model_name="model", lora_cfg=LoraConfig(enabled=True, init="pissa"))) == {}


@pytest.mark.parametrize("device", ["cpu", "rehearsal"])
def test_kernels_of_gpus_are_refused_where_the_cpu_computes(device):
    settings = {"fp8_cfg": {"enabled": True}, "moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2}
    found = problems(device=device, **settings)
    assert f"cluster.device is {device}" in found["megatron_cfg.fp8_cfg.enabled"].reason
    assert "DeepEP" in found["megatron_cfg.moe_token_dispatcher_type"].reason
    for other in ("cuda", "auto"):
        assert problems(device=other, **settings) == {}
    alone = problems(device="cuda", moe_token_dispatcher_type="flex")
    assert "above 1" in alone["megatron_cfg.moe_token_dispatcher_type"].reason


def test_8_bit_needs_its_engine():
    without = problems(device="cuda", fp8_cfg={"enabled": True}, transformer_engine=False)
    assert "transformer_engine is false" in without["megatron_cfg.fp8_cfg.enabled"].reason


@pytest.mark.parametrize("recipe", get_args(Fp8Config.model_fields["fp8_recipe"].annotation))
def test_checks_ask_for_no_section_that_a_model_apart_from_a_run_lacks(recipe):
    assert problems(device="cuda", fp8_cfg={"enabled": True, "fp8_recipe": recipe}) == {}


def test_layers_of_transformer_engine_take_no_adapters():
    model = ModelConfig(model_name="model", lora_cfg=LoraConfig(enabled=True))
    found = problems(model, device="cuda", fp8_cfg={"enabled": True})
    assert "lora_cfg.enabled=false" in found["megatron_cfg.fp8_cfg.enabled"].remedy
    assert problems(model) == {}


def test_environments_of_workers_on_gpus_get_transformer_engine():
    for wanted in (None, True):
        (requirement,) = PLUGIN.further(MegatronConfig(transformer_engine=wanted))
        assert dict(requirement.extras) == {"cuda": ("te",)}
    assert PLUGIN.further(MegatronConfig(transformer_engine=False)) == ()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 2}, 12),
        ({"expert_model_parallel_size": 4}, 4),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, 4),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8),
    ],
)
def test_ranks_hold_layers_and_experts(settings, expected):
    assert num_ranks(MegatronConfig(**settings)) == expected


@pytest.mark.parametrize(
    ("settings", "key", "mention"),
    [
        ({"tensor_model_parallel_size": 5}, "tensor_model_parallel_size", "num_attention_heads (12)"),
        ({"tensor_model_parallel_size": 6}, "tensor_model_parallel_size", "num_key_value_heads (4)"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size", "has no experts"),
        ({"pipeline_model_parallel_size": 5}, "pipeline_model_parallel_size", "at most 4"),
    ],
)
def test_a_layout_that_does_not_divide_a_model_on_this_machine_is_named(tmp_path, settings, key, mention):
    fields = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 24, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = ModelConfig(model_name=str(tmp_path))
    assert problems(model) == {}
    problem = problems(model, **settings)[f"megatron_cfg.{key}"]
    assert problem.got == settings[key]
    assert mention in f"{problem.reason}. {problem.remedy}"


def test_ranks_may_share_key_value_heads(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "num_key_value_heads": 2}))
    model = ModelConfig(model_name=str(tmp_path))
    assert problems(model, tensor_model_parallel_size=8) == {}
    for tensor, mesh in ((8, "tp4"), (2, "tp2")):
        section = SimpleNamespace(
            model_name=model.model_name,
            hf_config_overrides={},
            lora_cfg=model.lora_cfg,
            sequence_packing=model.sequence_packing,
            megatron_cfg=MegatronConfig(tensor_model_parallel_size=tensor),
        )
        assert PLUGIN.mesh_case(section).mesh == mesh


def test_a_fork_server_can_import_what_a_worker_and_a_generator_do():
    assert fork_problem("rl_megatron.worker", "rl_megatron.generation.generator") == ""


def test_8_bit_products_are_a_precision_that_the_loss_must_correct_for():
    assert MegatronConfig(fp8_cfg={"enabled": True}).reduced_precision == "megatron_cfg.fp8_cfg.enabled=true"
    assert not MegatronConfig().reduced_precision


@pytest.mark.parametrize(("data", "tensor", "stages"), [(1, 1, 1), (2, 4, 8), (4, 4, 8)])
@pytest.mark.parametrize(("reduces_wide", "each"), [(True, 6), (False, 4)])
def test_only_the_optimizer_is_spread_over_data_parallel_ranks(data, tensor, stages, reduces_wide, each):
    backend = MegatronConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        distributed_data_parallel_config={"grad_reduce_in_fp32": reduces_wide},
    )
    ranks, model = data * tensor * stages, ModelConfig(model_name="model")
    size = ModelSize(layers=64e9)
    found = PLUGIN.memory(model, backend, size, ranks, trained=size)
    assert ranks * found.device == 64e9 * (each * data + 12)
    # gradients are dropped while others use the device
    assert ranks * found.kept == 64e9 * (2 * data + 12)


def test_experts_are_split_over_expert_parallel_ranks():
    backend = MegatronConfig(expert_model_parallel_size=8)
    size = ModelSize(0, experts=8e9)
    found = PLUGIN.memory(ModelConfig(model_name="model"), backend, size, 32, trained=size)
    assert found.device == 1e9 * (6 + 12 / 4)


def test_a_model_that_does_not_train_needs_only_the_weights():
    size, backend = ModelSize(layers=8e9), MegatronConfig(tensor_model_parallel_size=2)
    found = PLUGIN.memory(ModelConfig(model_name="model"), backend, size, 4, trained=ModelSize(0))
    assert (found.device, found.kept, found.weights) == (8e9, 8e9, 0)


def test_frozen_parameters_have_no_state_and_muon_keeps_one_number_of_a_matrix():
    size, trained = ModelSize(layers=4e9, embedding=1e9, head=1e9), ModelSize(layers=2e9, head=1e9)
    muon = ModelConfig(model_name="model", optimizer={"name": "torch.optim.Muon", "kwargs": {"lr": 1e-3}})
    for model, matrices in ((ModelConfig(model_name="model"), 12), (muon, 8)):
        found = PLUGIN.memory(model, MegatronConfig(), size, 1, trained=trained)
        assert found.kept == 6e9 * 2 + 2e9 * matrices + 1e9 * 12
        assert found.device == found.kept + 3e9 * 4


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_every_precision_is_accepted(precision):
    assert "precision" not in problems(ModelConfig(model_name="model", precision=precision))
