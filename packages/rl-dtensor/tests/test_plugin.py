"""The light half: config, requirement and static checks."""

import json
from importlib.resources import files
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from rl_core.config import Config, load
from rl_core.config import resolve as resolve_config
from rl_core.errors import ConfigProblems
from rl_core.model_config import ModelConfig
from rl_core.plugins import POLICIES, plugin, resolve
from rl_core.testing.isolation import fork_problem
from rl_dtensor.config import DTensorConfig
from rl_dtensor.plugin import PLUGIN
from rl_dtensor.selfcheck import MESHES
from rl_dtensor.worker import DTensorWorker


def problems(model_name="m", dtensor_cfg=None, device="cpu", **policy):
    fields = ModelConfig(model_name=model_name, **policy)
    backend = DTensorConfig(**(dtensor_cfg or {}))
    cluster = SimpleNamespace(device=device)
    section = SimpleNamespace(**dict(fields), dtensor_cfg=backend)
    config = SimpleNamespace(cluster=cluster)
    return {problem.key: problem for check in PLUGIN.checks for problem in check(section, config)}


def test_it_is_found_by_name_and_names_its_worker():
    assert plugin(POLICIES, "dtensor") is PLUGIN
    assert resolve(PLUGIN.worker) is DTensorWorker
    assert callable(resolve(PLUGIN.preflight))
    assert PLUGIN.ranks(DTensorConfig(dp_replicate_size=4)) == 4


@pytest.mark.parametrize("settings", [{"tensor_parallel_siz": 2}, {"dp_replicate_size": 0}, {"cpu_offload": "yes"}])
def test_settings_that_would_do_nothing_are_refused(settings):
    with pytest.raises(ValidationError):
        DTensorConfig(**settings)


def test_ranks_are_counted_from_the_mesh():
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 3, "pipeline_parallel_size": 2}
    assert PLUGIN.ranks(DTensorConfig(**sizes, dp_replicate_size=2)) == 24
    assert PLUGIN.ranks(DTensorConfig(expert_parallel_size=4)) == 4
    assert PLUGIN.ranks(DTensorConfig(expert_parallel_size=4, context_parallel_size=2)) == 4


@pytest.mark.parametrize(
    ("settings", "key", "advice"),
    [
        ({"sequence_parallel": True}, "sequence_parallel", "tensor_parallel_size=2"),
        (
            {"custom_parallel_plan": {"model.layers.*.mlp.up_proj": "colwise"}},
            "custom_parallel_plan",
            "tensor_parallel_size=2",
        ),
        ({"expert_dispatcher": "deep_ep"}, "expert_dispatcher", "expert_parallel_size=2 or more, or remove"),
        ({"expert_chunks": 2}, "expert_chunks", "expert_parallel_size=2 or more, or remove"),
        (
            {"expert_chunks": 2, "expert_parallel_size": 2, "expert_dispatcher": "deep_ep"},
            "expert_chunks",
            "expert_dispatcher=all_to_all, or remove",
        ),
        ({"pipeline_chunks_per_rank": 2}, "pipeline_chunks_per_rank", "pipeline_chunks_per_rank=1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "4 attention heads. Set it to 2"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size", "2 key-value heads. Set it to 2"),
        ({"context_parallel_size": 3, "context_parallel_method": "ulysses"}, "context_parallel_size", "Set it to 2"),
        ({"expert_parallel_size": 2}, "expert_parallel_size", "no experts"),
        ({"pipeline_parallel_size": 2, "pipeline_chunks_per_rank": 2}, "pipeline_parallel_size", "at most 2"),
    ],
    ids=str,
)
def test_meshes_that_cannot_be_are_refused_with_the_nearest_that_can(tmp_path, settings, key, advice):
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = problems(str(tmp_path), settings)
    assert advice in found[f"dtensor_cfg.{key}"].message


def test_a_model_whose_config_is_not_at_hand_may_have_experts():
    assert not problems("owner/name", {"expert_parallel_size": 2})


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_experts_are_counted_under_the_names_that_families_give_them(tmp_path, name):
    key = "dtensor_cfg.expert_parallel_size"
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, name: 6}))
    assert not problems(str(tmp_path), {"expert_parallel_size": 3})
    problem = problems(str(tmp_path), {"expert_parallel_size": 4})[key]
    assert problem.got == 4
    assert "6 experts" in problem.reason
    assert "3" in problem.remedy
    split = problems(str(tmp_path), {"expert_parallel_size": 6, "tensor_parallel_size": 2})[key]
    assert "3 experts of each of 2 tensor-parallel ranks" in split.reason
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {name: 6}}))
    assert not problems(str(tmp_path), {"expert_parallel_size": 3})
    assert "6 experts" in problems(str(tmp_path), {"expert_parallel_size": 4})[key].reason


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 512},
        {"head_dim": 256, "global_head_dim": 512},
        {"hidden_size": 1024, "num_attention_heads": 2},
        {"head_dim": 64, "qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ],
    ids=str,
)
def test_heads_that_flash_attention_does_not_take_are_refused(tmp_path, sizes):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    found = problems(str(tmp_path), {"attention_backend": "flash_attention_2"}, device="cuda")
    problem = found["dtensor_cfg.attention_backend"]
    assert problem.got == "flash_attention_2"
    assert "256" in problem.reason
    assert "512" in problem.reason
    assert not problems(str(tmp_path), {"attention_backend": "auto"}, device="cuda")
    halves = {name: size if name == "num_attention_heads" else size // 2 for name, size in sizes.items()}
    (tmp_path / "config.json").write_text(json.dumps(halves))
    assert not problems(str(tmp_path), {"attention_backend": "flash_attention_2"}, device="cuda")


def test_a_kernel_without_the_soft_cap_of_the_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"attn_logit_softcapping": 50.0}))
    found = problems(str(tmp_path), {"attention_backend": "sdpa"})
    problem = found["dtensor_cfg.attention_backend"]
    assert problem.got == "sdpa"
    assert "soft cap" in problem.reason
    assert "auto" in problem.remedy
    assert not problems(str(tmp_path), {"attention_backend": "flash_attention_2"}, device="cuda")
    (tmp_path / "config.json").write_text(json.dumps({"attn_logit_softcapping": None}))
    assert not problems(str(tmp_path), {"attention_backend": "sdpa"})


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "selective"},
        {"tensor_parallel_size": 2},
        {"context_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"expert_parallel_size": 2},
    ],
    ids=str,
)
def test_layers_can_be_compiled_on_every_mesh(tmp_path, settings):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_experts": 4}))
    assert not problems(str(tmp_path), {"compile": True, **settings})


def test_attention_that_a_device_or_a_precision_cannot_run_is_refused():
    key = "dtensor_cfg.attention_backend"
    for backend in ("flash_attention_2", "flash_attention_3", "flex"):
        for device in ("cpu", "rehearsal"):
            found = problems(dtensor_cfg={"attention_backend": backend}, device=device)[key]
            assert (found.got, found.allowed) == (backend, "auto, sdpa, eager")
            assert device in found.reason
        for device in ("auto", "cuda"):
            assert not problems(dtensor_cfg={"attention_backend": backend}, device=device)
    flash = {"attention_backend": "flash_attention_2"}
    assert "precision=bfloat16" in problems(dtensor_cfg=flash, device="cuda", precision="float32")[key].remedy
    assert not problems(dtensor_cfg={"attention_backend": "flex"}, device="cuda", precision="float32")
    assert not problems(dtensor_cfg={"attention_backend": "eager"}, precision="float32")


def test_the_table_of_families_has_cases_of_the_self_check_and_none_is_off_without_a_reason():
    package, _, name = PLUGIN.family_table.partition(":")
    families = json.loads(files(package).joinpath(name).read_text(encoding="utf-8"))["families"]
    cases = [case for family in families.values() for case in family["cases"]]
    assert {"llama", "qwen3_moe", "olmo2"} <= set(families)
    for case in cases:
        assert (case["num_ranks"], case["settings"]) == MESHES[case["mesh"]]
        assert case["verdict"] == "exact" or case["reason"]


def test_a_fork_server_can_import_what_a_worker_and_a_generator_do():
    assert fork_problem("rl_dtensor.worker", "rl_dtensor.generation.generator") == ""


class Root(Config):
    dtensor_cfg: DTensorConfig = DTensorConfig()


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ({"activation_checkpointing": True}, r"is now dtensor_cfg\.recompute=full"),
        ({"activation_checkpointing": False}, r"is now dtensor_cfg\.recompute=none"),
        (
            {"activation_checkpointing": True, "recompute_granularity": "selective"},
            r"is now dtensor_cfg\.recompute=selective(.|\n)*is now dtensor_cfg\.recompute=selective",
        ),
        ({"recompute_granularity": "full"}, "Remove this line"),
    ],
)
def test_earlier_keys_of_recomputation_are_answered_with_the_present_one(written, answer):
    with pytest.raises(ConfigProblems, match=answer):
        resolve_config(load({"dtensor_cfg": written}), Root, checks=[])


def test_deep_ep_needs_gpus_and_bfloat16():
    key, chosen = "dtensor_cfg.expert_dispatcher", {"expert_parallel_size": 2, "expert_dispatcher": "deep_ep"}
    assert "needs GPUs" in problems(dtensor_cfg=chosen, precision="bfloat16")[key].message
    assert "bfloat16" in problems(dtensor_cfg=chosen, device="cuda", precision="float32")[key].remedy
    assert not problems(dtensor_cfg=chosen, device="cuda", precision="bfloat16")
    assert not problems(dtensor_cfg=chosen, device="auto", precision="bfloat16")


def test_float8_needs_a_gpu_or_says_that_it_is_an_emulation():
    key = "dtensor_cfg.float8.enabled"
    found = problems(dtensor_cfg={"float8": {"enabled": True}})
    assert "compute capability 8.9 or higher, but the device is cpu" in found[key].message
    assert "dtensor_cfg.float8.emulate=true" in found[key].remedy
    assert key in problems(dtensor_cfg={"float8": {"enabled": True}}, device="rehearsal")
    assert not problems(dtensor_cfg={"float8": {"enabled": True}}, device="cuda")
    assert not problems(dtensor_cfg={"float8": {"enabled": True, "emulate": True}})
    found = problems(dtensor_cfg={"float8": {"enabled": True}}, device="cuda", precision="float32")
    assert "precision=bfloat16" in found[key].remedy


@pytest.mark.parametrize(
    ("dtensor_cfg", "policy", "key", "advice"),
    [
        ({}, {"lora_cfg": {"enabled": True}}, "dtensor_cfg.qat.enabled", "lora_cfg.enabled=false"),
        ({"float8": {"enabled": True, "emulate": True}}, {}, "dtensor_cfg.qat.enabled", "Remove dtensor_cfg.float8"),
        ({"qat": {"enabled": True, "format": "mxfp4", "group_size": 64}}, {}, "dtensor_cfg.qat.group_size", "emove"),
    ],
)
def test_rounding_that_contradicts_other_settings_is_refused(dtensor_cfg, policy, key, advice):
    found = problems(dtensor_cfg={"qat": {"enabled": True}, **dtensor_cfg}, **policy)
    assert advice in found[key].remedy


def test_images_belong_to_one_row():
    vision = {"enabled": True}
    found = problems(sequence_packing={"shared_prefixes": True}, vision=vision)
    assert found["sequence_packing.shared_prefixes"].remedy == "Set it to auto or false"
    assert "sequence_packing.shared_prefixes" not in problems(
        sequence_packing={"shared_prefixes": "auto"}, vision=vision
    )


def test_float8_is_a_precision_that_the_loss_must_correct_for_and_rounded_weights_are_not():
    float8 = DTensorConfig(float8={"enabled": True, "emulate": True})
    assert float8.reduced_precision == "dtensor_cfg.float8.enabled=true"
    assert not DTensorConfig(qat={"enabled": True}).reduced_precision
