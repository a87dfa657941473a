"""Where an environment would come from is told without building it."""

import sys
from pathlib import Path

import pytest

from rl_core.plugins import Requirement
from rl_launch.worker_envs.plan import local_plan
from rl_launch.worker_envs.provision import TorchBuild, availability_of
from rl_launch.worker_envs.spec import worker_env

LIGHT = worker_env(Requirement("rl-envs", imports=("math_verify",)), "cpu")
TRAINER = worker_env(Requirement("rl-dtensor", {"cpu": ("worker",)}, ("torch",)), "cpu")


def found_for(spec, mode, root):
    return availability_of([spec], mode, root=str(root))[spec]


def as_if_built(spec, root, cuda):
    """The folder of a built environment, with nothing in it but torch's name and version."""
    env = Path(root) / local_plan(spec).folder
    packages = env / "lib/python{}.{}/site-packages".format(*sys.version_info[:2])
    for folder in (env / "bin", packages / "torch", packages / "torch-9.9.dist-info"):
        folder.mkdir(parents=True)
    (env / "bin/python").touch()
    (env / "complete.json").write_text("{}")
    (packages / "torch-9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    (packages / "torch/version.py").write_text(f"__version__ = '9.9'\ncuda: Optional[str] = {cuda!r}\n")


def test_what_the_driver_has_is_its_own(tmp_path):
    found = found_for(LIGHT, "auto", tmp_path)
    assert found.status == "driver"
    assert "math-verify" in found.packages


def test_what_is_still_to_be_built_is_told_by_its_pins_and_stays_so(tmp_path):
    found = found_for(TRAINER, "isolated", tmp_path)
    assert found.status == "to build"
    assert found.packages["torch"] == found.torch.version
    assert found.torch == TorchBuild(found.packages["torch"], "13.0")
    assert found.compiled == ()
    assert not list(tmp_path.iterdir())


def test_packages_that_are_published_as_sources_are_known_before_they_are_compiled(tmp_path):
    requirement = Requirement("rl-megatron", {"cuda": ("te", "worker")})
    assert found_for(worker_env(requirement, "cuda"), "isolated", tmp_path).compiled == ("transformer-engine-torch",)


@pytest.mark.parametrize(("cuda", "told"), [("13.0", "13.0"), (None, "")])
def test_what_is_built_is_read_from_its_own_files(tmp_path, cuda, told):
    as_if_built(TRAINER, tmp_path, cuda)
    found = found_for(TRAINER, "isolated", tmp_path)
    assert found.status == "built"
    assert found.packages == {"torch": "9.9"}
    assert found.torch == TorchBuild("9.9", told)


def test_what_cannot_be_had_says_why(tmp_path):
    nowhere = worker_env(Requirement("no-such-engine"), "cpu")
    shared, built = found_for(nowhere, "shared", tmp_path), found_for(nowhere, "auto", tmp_path)
    assert shared.status == built.status == "unavailable"
    assert shared.problem == "no-such-engine is not installed"
    assert "no-such-engine is not installed in the driver's environment" in built.problem


def test_without_uv_only_what_is_built_can_be_had(tmp_path, monkeypatch):
    as_if_built(TRAINER, tmp_path, None)
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "/nowhere")
    found = availability_of([TRAINER, LIGHT], "isolated", root=str(tmp_path))
    assert found[TRAINER].status == "built"
    assert found[LIGHT].status == "unavailable"
    assert "uv is not installed" in found[LIGHT].problem
