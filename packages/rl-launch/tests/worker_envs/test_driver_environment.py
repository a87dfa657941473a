import sys

import pytest

from rl_core.errors import WorkerEnvironmentError
from rl_core.plugins import Requirement
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.provision import provision
from rl_launch.worker_envs.spec import worker_env


def spec(distribution, extras=(), imports=()):
    return worker_env(Requirement(distribution, {"cpu": extras}, imports), "cpu")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretends that distributions are installed, by metadata on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, version, *requires, extras=()):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {text}" for text in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    return install


def test_the_driver_can_run_what_it_has():
    assert missing(spec("rl-envs", imports=("math_verify",))) == []


def test_a_distribution_that_is_absent_is_named():
    assert missing(spec("no-such-engine")) == ["no-such-engine is not installed"]


def test_an_extra_whose_packages_are_absent_is_named(installed):
    installed("engine-x", "1", 'engine-y>=2; extra == "gpu"', extras=("gpu",))
    assert missing(spec("engine-x")) == []
    assert missing(spec("engine-x", ("gpu",))) == ["engine-x[gpu] needs engine-y, which is not installed"]


def test_another_version_than_required_does_not_do(installed):
    installed("engine-x", "1", "engine-y>=2,<3")
    installed("engine-y", "3.1")
    assert missing(spec("engine-x")) == ["engine-x needs engine-y<3,>=2, but 3.1 is installed"]


def test_extras_of_extras_are_followed(installed):
    installed("engine-x", "1", 'engine-y[fast]; extra == "gpu"', extras=("gpu",))
    installed("engine-y", "2", 'engine-z==7; extra == "fast"', extras=("fast",))
    assert missing(spec("engine-x", ("gpu",))) == ["engine-y[fast] needs engine-z, which is not installed"]


def test_a_local_version_satisfies_the_public_one(installed):
    installed("engine-x", "1", "engine-y==2.13.0")
    installed("engine-y", "2.13.0+cpu")
    assert missing(spec("engine-x")) == []


def test_an_unknown_extra_and_a_module_that_is_not_there_are_named(installed):
    installed("engine-x", "1")
    assert missing(spec("engine-x", ("gpu",))) == ["engine-x 1 has no extra 'gpu'"]
    assert missing(spec("engine-x", (), ("engine_x_module",))) == ["the module engine_x_module is missing"]


def test_auto_and_shared_use_the_driver_where_it_will_do(tmp_path):
    light = spec("rl-envs")
    for mode in ("auto", "shared"):
        assert provision([light], mode, root=str(tmp_path)) == {light: sys.executable}
    assert not list(tmp_path.iterdir())


def test_shared_says_everything_that_is_missing_and_what_to_install():
    with pytest.raises(WorkerEnvironmentError) as caught:
        provision([spec("rl-envs"), spec("engine-a"), spec("engine-b", ("gpu",))], "shared")
    text = str(caught.value)
    assert "engine-a: engine-a is not installed" in text
    assert "engine-b.gpu: engine-b[gpu] is not installed" in text
    assert "cluster.worker_envs=auto" in text
