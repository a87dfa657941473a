import sys

import pytest

from rl_launch.worker_envs import worker_variables


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "UV_PROJECT_ENVIRONMENT", "UV", "UV_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)


def test_a_worker_in_the_drivers_environment_needs_nothing():
    assert worker_variables(sys.executable) == {}


def test_a_built_environment_is_its_own_and_keeps_its_bytecode(monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", "/driver")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "/driver")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = worker_variables("/envs/engine/bin/python")
    assert variables["VIRTUAL_ENV"] == "/envs/engine"
    assert variables["UV_PROJECT_ENVIRONMENT"] == ""
    assert variables["PYTHONDONTWRITEBYTECODE"] == variables["PYTHONPYCACHEPREFIX"] == ""


def test_bytecode_goes_aside_where_the_driver_writes_none_and_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    monkeypatch.setattr("rl_launch.worker_envs.variables._is_compiled", lambda: False)
    assert worker_variables(sys.executable) == {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(tmp_path / "pycache"),
    }
