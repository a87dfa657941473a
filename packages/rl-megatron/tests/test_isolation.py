"""The driver reads the configs of both plugins without Megatron, in an environment that has it."""

from rl_core.testing.isolation import light_modules_of, loaded_by

ENGINES = {"megatron", "peft", "ray", "safetensors", "torch", "transformers", "vllm"}


def test_configs_and_plugins_load_no_engine():
    light = light_modules_of("rl_megatron")
    assert {"rl_megatron.plugin", "rl_megatron.generation.plugin"} <= set(light)
    assert not loaded_by(*light) & ENGINES
