"""The driver reads the configs of both plugins without torch, in an environment that has it."""

from rl_core.testing.isolation import light_modules_of, loaded_by

ENGINES = {"megatron", "peft", "ray", "safetensors", "torch", "transformers", "vllm"}


def test_configs_and_plugins_load_no_engine():
    light = light_modules_of("rl_dtensor")
    assert {"rl_dtensor.plugin", "rl_dtensor.generation.plugin"} <= set(light)
    assert not loaded_by(*light) & ENGINES
