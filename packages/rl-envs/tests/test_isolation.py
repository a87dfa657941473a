"""An environment's config is read where its package's own dependencies are not loaded."""

from rl_core.testing.isolation import light_modules_of, loaded_by, modules_of

ENGINES = {"megatron", "ray", "torch", "transformers", "vllm"}


def test_configs_and_plugins_load_no_verifier():
    light = light_modules_of("rl_envs")
    assert {"rl_envs.math.plugin", "rl_envs.reasoning_gym.plugin", "rl_envs.code.plugin"} <= set(light)
    assert not loaded_by(*light) & (ENGINES | {"math_verify", "reasoning_gym", "sympy"})


def test_environments_need_no_engine_but_a_reward_model():
    of_others = ("rl_envs.reward_model", "rl_envs.verifiers.chat", "rl_envs.verifiers.example")
    assert not loaded_by(*modules_of("rl_envs", outside=of_others)) & ENGINES
    assert not loaded_by(*modules_of("rl_envs.reward_model")) & {"megatron", "ray", "vllm"}


def test_what_runs_beside_programs_is_the_standard_library():
    loaded = loaded_by("rl_envs.sandbox.zygote")
    assert not loaded & {"numpy", "omegaconf", "pydantic", "rl_core", "yaml"}
