"""Only rl_algos.torch knows of torch, and nothing of an engine or of ray."""

from rl_core.testing.isolation import light_modules_of, loaded_by, modules_of

ENGINES = {"megatron", "ray", "torch", "vllm"}


def test_the_package_alone_loads_no_tokenizer():
    assert not loaded_by("rl_algos") & (ENGINES | {"datasets", "transformers"})


def test_configs_and_plugins_load_no_engine():
    light = light_modules_of("rl_algos")
    assert {"rl_algos.grpo.plugin", "rl_algos.sft.plugin"} <= set(light)
    assert not loaded_by(*light) & (ENGINES | {"datasets", "transformers"})


def test_everything_outside_the_loss_implementations_loads_no_torch():
    assert not loaded_by(*modules_of("rl_algos", outside=("rl_algos.torch",))) & ENGINES


def test_loss_implementations_need_no_ray():
    loaded = loaded_by(*modules_of("rl_algos.torch"))
    assert "torch" in loaded
    assert not loaded & (ENGINES - {"torch"})
