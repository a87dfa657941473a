"""Ray nodes that a run starts for itself end with it, and take no signal that was meant for it."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from rl_core.errors import ConfigError, RLError
from rl_core.testing.exhaustive import exhaustive
from rl_launch.cluster import ray_nodes, virtual_cluster  # noqa: F401  # sets what Ray reads when it is imported
from rl_launch.cluster.ray_nodes import MAX_NODES, RayNodes, logical_nodes, one_node

DRIVER = """
import json, os, signal, sys
from rl_launch.cluster import virtual_cluster
from rl_launch.cluster.ray_nodes import RayNodes
nodes = RayNodes([{"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}])
import psutil
print(json.dumps([each.pid for each in psutil.Process().children(recursive=True)]), flush=True)
signal.pause()
"""


def test_a_signal_to_the_drivers_group_spares_ray_which_ends_with_the_driver():
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, start_new_session=True)
    try:
        pids = json.loads(driver.stdout.readline())
        started = [psutil.Process(pid) for pid in pids]
        names = {process.name() for process in started}
        assert {"gcs_server", "raylet"} <= names
        assert driver.pid not in {os.getpgid(pid) for pid in pids}
        assert driver.pid not in {os.getsid(pid) for pid in pids}
        driver.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=120)
        assert not alive
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def test_what_is_stopped_is_killed_when_the_driver_has_ended_with_its_own_code():
    code = DRIVER.replace("signal.pause()", "sys.stdin.readline()\nnodes.kill_afterwards()\nos._exit(75)")
    pipe = subprocess.PIPE
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True)
    started = []
    try:
        started += [psutil.Process(pid) for pid in json.loads(driver.stdout.readline())]
        for process in started:
            process.suspend()
        driver.stdin.write(b"\n")
        driver.stdin.close()
        assert driver.wait(60) == 75
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
    finally:
        driver.kill()
        driver.wait()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        driver.stdout.close()


WORKERS = """
import json, os
import psutil, ray
from rl_launch.cluster import virtual_cluster
from rl_launch.cluster.ray_nodes import RayNodes, one_node
nodes = RayNodes(one_node(4))
ray.init(nodes.address)
actor = ray.remote(type("Actor", (), {"pid": lambda self: os.getpid()})).remote()
pid = ray.get(actor.pid.remote())
raylet = psutil.Process(pid).parent()
beside = [each.cmdline()[0] for each in raylet.children() if each.cmdline()]
services = [os.path.basename(word) for each in raylet.parent().children() for word in each.cmdline()]
session = ray._private.worker.global_worker.node.get_session_dir_path()
mode = os.stat(os.path.dirname(os.path.dirname(session))).st_mode & 0o777
ray.shutdown()
nodes.close()
print(json.dumps([beside, services, mode, os.path.exists(session)]))
"""


@exhaustive
def test_a_run_starts_no_process_that_it_does_not_need_in_a_private_folder_that_it_removes():
    settings = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=240, check=True, env=settings
    )
    beside, services, mode, is_left = json.loads(done.stdout)
    assert sorted(beside) == ["ray::Actor", "ray::DashboardAgent", "ray::RuntimeEnvAgent"]
    assert not {"log_monitor.py", "monitor.py"} & set(services)
    assert {"gcs_server", "raylet"} <= set(services)
    assert mode == 0o700
    assert not is_left


def test_nodes_that_do_not_start_say_why():
    with pytest.raises(RLError, match=r"Ray did not start in 3 attempts; the last said: .*no_such_setting"):
        RayNodes([{"no_such_setting": 1}])


def test_nodes_that_never_answer_are_given_up_and_killed(tmp_path, monkeypatch):
    keeper = tmp_path / "python"
    keeper.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    keeper.chmod(0o755)
    monkeypatch.setattr(ray_nodes.sys, "executable", str(keeper))
    with pytest.raises(RLError, match=r"did not start within 1 s \(cluster.process_timeout_s\).*firewall"):
        RayNodes([{}], timeout_s=1)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_rehearsal_has_an_address_and_gpus_for_each_node_up_to_a_bound():
    nodes = logical_nodes(3, 2)
    assert [node["node_ip_address"] for node in nodes] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert {node["num_gpus"] for node in nodes} == {2}
    with pytest.raises(ConfigError, match=f"at most {MAX_NODES} nodes on one machine"):
        logical_nodes(MAX_NODES + 1, 1)


def test_a_ray_of_one_node_has_a_cpu_for_each_rank_and_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    [node] = one_node(1000)
    assert (node["num_cpus"], node["num_gpus"]) == (1000, 3)
