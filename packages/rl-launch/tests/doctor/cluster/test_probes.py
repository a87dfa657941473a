"""Probes are sent to nodes that have ray and nothing of this project."""

import subprocess
import sys

from ray import cloudpickle

import rl_launch.doctor.cluster.probes  # noqa: F401 - registers the modules that are sent
from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.node_readings import Readings

NODE = """
import sys
from types import SimpleNamespace

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("rl_"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import ray
from ray import cloudpickle
ray._private.worker._global_node = SimpleNamespace(get_session_dir_path=lambda: "/tmp")
probe = cloudpickle.loads(sys.stdin.buffer.read())("127.0.0.1")
assert probe.listen()
assert probe.run_ranks(["echo"], ["rank"], {}, 60)[0].output == "rank\\n"
assert probe.meet("/nowhere", "token", "name", [], 0.0).problem
sys.stdout.buffer.write(cloudpickle.dumps(probe.readings("/tmp")))
"""


def test_a_node_without_this_project_runs_the_probe():
    sent = cloudpickle.dumps(NodeProbe)
    done = subprocess.run([sys.executable, "-P", "-c", NODE], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    readings = cloudpickle.loads(done.stdout)
    assert isinstance(readings, Readings)
    assert set(readings.rooms) == {"runs", "temporary files", "Ray", "RL_HOME"}
    assert set(readings.limits) == {"nofile", "nproc", "memlock"}
    assert readings.facts.interface == "lo"
