"""The driver's environment, in which these tests run, has every plugin and no engine."""

import importlib.util

import pytest

from rl_core import plugins
from rl_core.testing.isolation import loaded_by


@pytest.mark.parametrize("engine", ["flash_attn", "megatron", "torch", "transformer_engine", "vllm"])
def test_no_engine_is_installed(engine):
    assert importlib.util.find_spec(engine) is None


@pytest.mark.parametrize(
    ("group", "names"),
    [
        (plugins.POLICIES, {"dtensor", "megatron"}),
        (plugins.GENERATORS, {"hf", "megatron", "server", "vllm"}),
        (plugins.ENVIRONMENTS, {"math", "reasoning_gym", "reward_model"}),
        (plugins.ALGORITHMS, {"dpo", "grpo", "rm", "sft"}),
        (plugins.DATASETS, {"arithmetic", "arithmetic_preference", "reasoning_gym"}),
    ],
)
def test_every_plugin_of_the_workspace_is_found_and_loads(group, names):
    assert names <= set(plugins.names(group))
    for name in names:
        assert plugins.plugin(group, name).name == name


def test_reading_every_plugin_starts_no_runtime():
    modules = [
        "rl_dtensor.plugin",
        "rl_dtensor.generation.plugin",
        "rl_megatron.plugin",
        "rl_megatron.generation.plugin",
        "rl_vllm.plugin",
    ]
    assert not loaded_by("rl_launch", *modules) & {"datasets", "ray", "transformers"}
