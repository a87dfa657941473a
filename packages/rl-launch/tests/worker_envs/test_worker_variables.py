import shutil
import sys

import pytest

from rl_launch.worker_envs.variables import chosen_variables, worker_process_environment, worker_variables


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
    assert variables["PATH"] == "/envs/engine/bin:${PATH}", "Ray puts the path of the worker's node there"
    assert variables["PYTHONDONTWRITEBYTECODE"] == variables["PYTHONPYCACHEPREFIX"] == ""


def test_programs_of_a_built_environment_are_found_before_those_of_the_node(tmp_path):
    folder = tmp_path / "engine" / "bin"
    folder.mkdir(parents=True)
    for name in ("ninja", "env"):
        program = folder / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    environment = worker_process_environment(str(folder / "python"))
    assert shutil.which("ninja", path=environment["PATH"]) == str(folder / "ninja")
    assert shutil.which("env", path=environment["PATH"]) == str(folder / "env")
    assert shutil.which("sh", path=environment["PATH"])


def test_bytecode_goes_aside_where_the_driver_writes_none_and_has_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("RL_HOME", str(tmp_path))
    monkeypatch.setattr("rl_launch.worker_envs.variables._is_compiled", lambda: False)
    assert worker_variables(sys.executable) == {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(tmp_path / "pycache"),
    }


def test_settings_of_engines_libraries_reach_workers_on_other_nodes(monkeypatch):
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = chosen_variables()
    assert (found["NCCL_IB_HCA"], found["GLOO_SOCKET_IFNAME"], found["HF_HUB_OFFLINE"]) == ("mlx5_0", "eth1", "1")


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "VLLM_API_KEY", "HF_SECRET_X", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "OMP_NUM_THREADS", "PATH"]
)
def test_secrets_and_what_describes_the_drivers_machine_stay_there(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    assert name not in chosen_variables()


def test_a_parallelism_setting_of_tokenizers_is_not_taken_for_a_token(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert chosen_variables()["TOKENIZERS_PARALLELISM"] == "false"


def test_a_config_wins_over_the_driver_and_the_nearer_section_over_the_wider(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "not forwarded")
    chosen = chosen_variables({"NCCL_DEBUG": "INFO", "HF_TOKEN": "named"}, {"NCCL_DEBUG": "TRACE"})
    assert (chosen["NCCL_DEBUG"], chosen["HF_TOKEN"]) == ("TRACE", "named")
