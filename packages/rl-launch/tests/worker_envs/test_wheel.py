import importlib.metadata
import subprocess
import sys
import zipfile
from io import BytesIO

import pytest

from rl_core.errors import WorkerEnvironmentError
from rl_launch.worker_envs.node_build import find_uv
from rl_launch.worker_envs.wheel import Wheel, installed_wheel


@pytest.fixture
def light(tmp_path, monkeypatch):
    """A distribution with package data and an entry point, installed from its wheel and found on the path."""
    source = tmp_path / "source"
    (source / "light_package/data").mkdir(parents=True)
    (source / "light_package/__init__.py").write_text("ANSWER = 42\n")
    (source / "light_package/data/table.txt").write_text("x\n")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "light-package"\nversion = "1.2"\n[project.scripts]\nlight = "light_package:main"\n'
        '[project.entry-points."some.group"]\nlight = "light_package"\n'
    )
    venv = tmp_path / "venv"
    for command in (
        ("venv", "--quiet", "--no-project", "--python", sys.executable, str(venv)),
        ("pip", "install", "--quiet", "--python", str(venv / "bin/python"), str(source)),
    ):
        subprocess.run([find_uv(), *command], check=True, cwd=tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    monkeypatch.syspath_prepend(str(site))
    return site


def unpacked(wheel: Wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(wheel.content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_is_put_together_installs_to_the_same_files(light, tmp_path):
    subprocess.run([sys.executable, "-c", "import light_package"], check=True, env={"PYTHONPATH": str(light)})
    wheel = installed_wheel("light-package")
    assert wheel.file_name == "light_package-1.2-py2.py3-none-any.whl"
    again = tmp_path / "again"
    (tmp_path / wheel.file_name).write_bytes(wheel.content)
    command = [find_uv(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(again), "--no-deps"]
    subprocess.run([*command, str(tmp_path / wheel.file_name)], check=True, cwd=tmp_path)
    assert (again / "light_package/data/table.txt").read_text() == "x\n"
    (found,) = importlib.metadata.distributions(path=[str(again)], name="light-package")
    assert {(entry.group, entry.name) for entry in found.entry_points} == {
        ("console_scripts", "light"),
        ("some.group", "light"),
    }


def test_it_is_the_code_that_is_there_not_the_code_that_was_installed(light):
    before = installed_wheel("light-package")
    assert installed_wheel("light-package") == before
    (light / "light_package/__init__.py").write_text("ANSWER = 43\n")
    after = installed_wheel("light-package")
    assert unpacked(after)["light_package/__init__.py"] == b"ANSWER = 43\n"
    assert after.content != before.content


def test_nothing_of_the_installation_comes_along(light):
    names = set(unpacked(installed_wheel("light-package")))
    assert names == {
        "light_package/__init__.py",
        "light_package/data/table.txt",
        *(f"light_package-1.2.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")),
    }


def test_a_package_for_one_platform_is_refused():
    with pytest.raises(WorkerEnvironmentError, match=r"numpy .* not a pure-Python wheel"):
        installed_wheel("numpy")
