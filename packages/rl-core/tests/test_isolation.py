"""rl-core imports no engine outside the folders named for one, and next to nothing at first."""

import pytest

from rl_core.testing.isolation import loaded_by, loaded_by_command, modules_of

HEAVY = ("rl_core.ray", "rl_core.selfcheck", "rl_core.testing", "rl_core.torch")
ENGINES = {"datasets", "jinja2", "megatron", "ray", "torch", "transformers", "vllm"}


def test_the_package_alone_loads_no_dependency():
    assert not loaded_by("rl_core") & (ENGINES | {"numpy", "omegaconf", "pydantic", "yaml"})


def test_everything_outside_the_heavy_folders_loads_no_engine():
    light = modules_of("rl_core", outside=HEAVY)
    assert "rl_core.data.batch" in light
    assert not loaded_by(*light) & ENGINES


def test_actors_need_no_torch():
    assert not loaded_by(*modules_of("rl_core.ray")) & (ENGINES - {"ray"})


def test_tensor_code_needs_no_ray():
    loaded = loaded_by(*modules_of("rl_core.torch"))
    assert "torch" in loaded
    assert not loaded & {"megatron", "ray", "vllm"}


def test_a_module_that_cannot_be_imported_is_an_error():
    with pytest.raises(ImportError, match="no_such_module"):
        loaded_by("rl_core.no_such_module")


def test_a_command_is_followed_to_its_end():
    assert {"json", "tokenize"} <= loaded_by_command("tokenize:main", "no_such_file.py")
    assert "wave" not in loaded_by_command("tokenize:main", "no_such_file.py")
