"""The key that was meant comes first."""

from typing import Any

import pytest

from rl_core.config import Config, all_keys, nearest


@pytest.fixture(scope="module")
def keys(root: type[Config]) -> list[str]:
    return list(all_keys(root, {"env": {"math": {}}, "data": {"train": [{}]}}))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("grpo.num_promts_per_step", "grpo.num_prompts_per_step"),
        ("grpo.nun_generations_per_prompt", "grpo.num_generations_per_prompt"),
        ("grpo.num_generation_per_prompts", "grpo.num_generations_per_prompt"),
        ("grpo.num_prompts", "grpo.num_prompts_per_step"),
        ("grpo.prompts_per_step", "grpo.num_prompts_per_step"),
        ("grpo.num-prompts-per-step", "grpo.num_prompts_per_step"),
        ("grpo.max_steps", "grpo.max_num_steps"),
        ("grpo.NUM_PROMPTS_PER_STEP", "grpo.num_prompts_per_step"),
        ("policy.num_prompts_per_step", "grpo.num_prompts_per_step"),
        ("num_prompts_per_step", "grpo.num_prompts_per_step"),
        ("grop", "grpo"),
        ("grop.seed", "grpo.seed"),
        ("polcy", "policy"),
        ("loss", "loss_fn"),
        ("loss_fn.clip_ratio_min", "loss_fn.ratio_clip_min"),
        ("loss_fn.kl_penalty", "loss_fn.reference_policy_kl_penalty"),
        ("grpo.kl_penalty", "loss_fn.reference_policy_kl_penalty"),
        ("policy.model", "policy.model_name"),
        ("policy.modelname", "policy.model_name"),
        ("policy.max_sequence_length", "policy.max_total_sequence_length"),
        ("policy.temperature", "policy.generation.temperature"),
        ("generation.temperature", "policy.generation.temperature"),
        ("policy.generation.temprature", "policy.generation.temperature"),
        ("dtensor_cfg", "policy.dtensor_cfg"),
        ("policy.vllm_cfg", "policy.generation.vllm_cfg"),
        ("policy.dtensor_cfg.tensor_parallel", "policy.dtensor_cfg.tensor_parallel_size"),
        ("policy.generation.vllm_cfg.tensor_parallell_size", "policy.generation.vllm_cfg.tensor_parallel_size"),
        ("env.math.num_worker", "env.math.num_workers"),
        ("data.train[0].spilt", "data.train[0].split"),
        ("data.dataset_name", "data.train[0].dataset_name"),
    ],
)
def test_the_key_that_was_meant_is_named_first(keys: list[str], typed: str, meant: str) -> None:
    assert nearest(typed, keys)[:1] == [meant]


@pytest.mark.parametrize("typed", ["grpo.zzz", "foo", "policy.qlora", "x.y.z"])
def test_what_is_like_nothing_names_nothing(keys: list[str], typed: str) -> None:
    assert nearest(typed, keys) == []


def test_a_name_that_several_sections_have_names_them(keys: list[Any]) -> None:
    assert set(nearest("policy.tensor_parallel_size", keys)) == {
        "policy.dtensor_cfg.tensor_parallel_size",
        "policy.generation.vllm_cfg.tensor_parallel_size",
    }
