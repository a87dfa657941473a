"""The command line answers before it loads what only a run needs, and no part of the runtime needs an engine."""

from rl_core.testing.isolation import loaded_by, modules_of


def test_the_package_alone_loads_no_runtime():
    assert not loaded_by("rl_launch") & {"datasets", "pydantic", "ray", "rich", "transformers", "typer"}


def test_the_command_line_loads_no_runtime():
    assert not loaded_by("rl_launch.cli") & {"datasets", "ray", "tensorboardX", "transformers"}


def test_what_is_found_wrong_before_a_run_starts_waits_for_no_tokenizer_and_no_ray():
    checks = ("rl_launch.commands.train", "rl_algos.grpo.loop", "rl_algos.sft.algorithm", "rl_algos.dpo.algorithm")
    assert not loaded_by(*checks) & {"datasets", "ray", "tensorboardX", "tokenizers", "transformers"}


def test_the_runtime_loads_no_engine():
    assert not loaded_by(*modules_of("rl_launch")) & {"megatron", "torch", "vllm"}
