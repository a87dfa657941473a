"""Real environments, of this project's own light packages: engines take minutes and are for the integration tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.errors import WorkerEnvironmentError
from rl_core.plugins import Requirement
from rl_core.testing.exhaustive import exhaustive
from rl_launch.worker_envs import node_build
from rl_launch.worker_envs.node_build import find_uv
from rl_launch.worker_envs.plan import find_checkout, members_of
from rl_launch.worker_envs.provision import provision
from rl_launch.worker_envs.spec import worker_env

MATH = worker_env(Requirement("rl-envs", imports=("math_verify",)), "cpu")
PROBE = """
import importlib.util as u, rl_envs, sys
found = [name for name in ("ray", "rl_core", "rl_launch", "rl_algos") if u.find_spec(name)]
print(sys.prefix, rl_envs.__file__, *found)
"""


def seen_by(python):
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True)
    prefix, module, *found = done.stdout.split()
    return prefix, Path(module), found


@pytest.mark.skipif(find_checkout() is None, reason="needs an editable installation")
@exhaustive
def test_in_a_checkout_an_isolated_worker_runs_its_sources_and_has_nothing_else(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", logger="rl_launch")
    python = provision([MATH], "isolated", root=str(tmp_path))[MATH]
    prefix, module, found = seen_by(python)
    assert prefix.startswith(str(tmp_path))
    assert module.is_relative_to(find_checkout())
    assert found == ["ray", "rl_core"]
    monkeypatch.setattr(subprocess, "Popen", None)  # what is built starts no process
    assert provision([MATH], "isolated", root=str(tmp_path)) == {MATH: python}
    assert [message.partition(": ")[2][:8] for message in caplog.messages] == ["built in", "cached"]


@exhaustive
def test_a_clean_installation_of_the_wheels_builds_from_what_it_ships(tmp_path):
    """Wheels in a fresh environment, no checkout in sight."""
    checkout = find_checkout()
    if checkout is None:
        pytest.skip("needs the sources to make wheels from")
    uv, environment = find_uv(), node_build.clean_environment() | {"RL_HOME": str(tmp_path / "home")}

    def execute(*command):
        subprocess.run(command, check=True, cwd=tmp_path, env=environment)

    names = ("rl-algos", "rl-core", "rl-envs", "rl-launch")
    for name in names:
        execute(uv, "build", "--quiet", "--wheel", "--out-dir", str(tmp_path / "dist"), str(members_of(checkout)[name]))
    clean = tmp_path / "clean"
    execute(uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(clean))
    wheels = [str(path) for path in (tmp_path / "dist").glob("*.whl")]
    execute(uv, "pip", "install", "--quiet", "--no-config", "--python", str(clean / "bin/python"), *wheels)
    script = (
        "from rl_core.plugins import Requirement; from rl_launch.worker_envs.provision import provision\n"
        "from rl_launch.worker_envs.spec import worker_env\n"
        "spec = worker_env(Requirement('rl-envs', imports=('math_verify',)), 'cpu')\n"
        "print(provision([spec], 'isolated')[spec])"
    )
    done = subprocess.run(
        [str(clean / "bin/python"), "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    prefix, module, found = seen_by(done.stdout.strip())
    assert prefix.startswith(str(tmp_path / "home/envs"))
    assert module.is_relative_to(prefix)
    assert found == ["ray", "rl_core"]


def test_a_build_that_fails_names_the_environment_and_what_to_do(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(WorkerEnvironmentError, match=r"environment rl-envs cannot be written: .*RL_HOME"):
        provision([MATH], "isolated", root=str(blocked / "envs"))


def test_a_worker_class_of_a_package_that_is_nowhere_is_refused(tmp_path):
    nowhere = worker_env(Requirement("no-such-engine"), "cpu")
    with pytest.raises(WorkerEnvironmentError, match="no-such-engine is not installed in the driver's environment"):
        provision([nowhere], "auto", root=str(tmp_path))
    assert not os.listdir(tmp_path)
