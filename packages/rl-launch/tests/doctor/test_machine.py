"""A look at the machine that the tests run on, and at what its tools say."""

import importlib.metadata
import socket
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from rl_launch.doctor import machine
from rl_launch.doctor.checks import CHECKS
from rl_launch.doctor.findings import examine
from rl_launch.doctor.machine import Gpu, Machine, ask_driver, read_log
from rl_launch.doctor.needs import needs_of

LOG = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <driver_version>580.65.06</driver_version>
  <cuda_version>13.0</cuda_version>
  <attached_gpus>2</attached_gpus>
  <gpu id="00000000:19:00.0">
    <product_name>NVIDIA H200</product_name>
    <fb_memory_usage><total>143771 MiB</total><reserved>600 MiB</reserved><used>1 MiB</used></fb_memory_usage>
  </gpu>
  <gpu id="00000000:1A:00.0">
    <product_name>NVIDIA H200</product_name>
    <fb_memory_usage><total>N/A</total><used>N/A</used></fb_memory_usage>
  </gpu>
</nvidia_smi_log>
"""


def test_packages_of_the_project_with_other_versions_than_they_need_are_found(monkeypatch):
    installed = machine.project_distributions()
    assert {"rl-core", "rl-launch", "rl-vllm"} <= set(installed)
    version = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.1" if name == "rl-core" else version(name))
    unmet = Machine().unmet
    assert all(
        any(each.startswith(f"{name} needs rl-core") for each in unmet) for name in installed if name != "rl-core"
    )


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program of this name first on the PATH."""

    def put(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


def test_no_check_fails_on_this_machine():
    here = Machine()
    findings = examine(here, needs_of("grpo-arithmetic", [], num_gpus=0), CHECKS).findings
    assert not [each for each in findings if each.found.startswith("could not be checked")]


def test_figures_are_those_of_the_system(tmp_path):
    here = Machine()
    assert 0 < here.available_bytes <= here.memory_bytes <= psutil.virtual_memory().total
    assert 0 < here.cores <= psutil.cpu_count()
    space = here.space(tmp_path / "not" / "there" / "yet")
    assert space.is_writable
    assert space.total_bytes == psutil.disk_usage(str(tmp_path)).total
    assert not here.space(tmp_path / __file__ / "below-a-file").is_writable


def test_ports_are_opened_and_given_back():
    before = len(psutil.Process().net_connections())
    Machine().open_ports(8)
    assert len(psutil.Process().net_connections()) == before


def test_an_address_answers_where_something_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert Machine().answers(address)
    assert not Machine().answers(address)
    assert not Machine().answers("nonsense")


def test_ray_is_looked_for_where_it_would_be(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    assert str(Machine().ray_folder) == "/short/ray"


def test_an_environment_is_asked_whether_it_runs_here(monkeypatch):
    environment = SimpleNamespace(label="code")
    monkeypatch.setattr(
        machine, "machine_check_of", lambda each: (lambda: "no namespaces") if each is environment else None
    )
    assert Machine().environment_problem(environment) == "no namespaces"
    assert Machine().environment_problem(SimpleNamespace(label="math")) is None


def test_the_driver_is_read_from_its_own_program(program, tmp_path):
    (tmp_path / "log.xml").write_text(LOG)
    program("nvidia-smi", f"cat {tmp_path}/log.xml")
    driver = ask_driver()
    assert driver == read_log(LOG)
    assert (driver.version, driver.cuda) == ("580.65.06", "13.0")
    assert driver.gpus == (Gpu("NVIDIA H200", 143771 * 2**20, 2**20), Gpu("NVIDIA H200", None, None))


def test_a_driver_that_fails_is_an_error_with_its_words(program):
    program("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    with pytest.raises(OSError, match="nvidia-smi ended with exit code 9: NVIDIA-SMI has failed"):
        ask_driver()


def test_without_a_driver_there_is_nothing_to_ask(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert ask_driver() is None


def test_without_uv_a_machine_has_none(tmp_path):
    """In a process that cannot import uv and finds none on its PATH."""
    script = "import sys; sys.modules['uv'] = None; from rl_launch.doctor.machine import Machine; print(Machine().uv)"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "None"
