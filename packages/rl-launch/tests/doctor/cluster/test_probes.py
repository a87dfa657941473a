"""Probes are sent to nodes that have ray and nothing of this project."""

import subprocess
import sys

import ray
from ray import cloudpickle

from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.node_readings import Readings
from rl_launch.doctor.cluster.probes import Probes

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


def test_nodes_that_are_late_lost_or_fail_are_named_and_left_out(monkeypatch):
    results = {"fine": 1, "lost": ray.exceptions.RayActorError(), "fails": OSError("no space")}
    results["fails"] = ray.exceptions.RayTaskError("listen", "", results["fails"])

    def get(ref):
        if isinstance(results[ref], Exception):
            raise results[ref]
        return results[ref]

    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([ref for ref in refs if ref in results], ["late"]))
    monkeypatch.setattr(ray, "get", get)
    probes = Probes([], {}, timeout_s=5)
    refs = {name: name for name in ("fine", "late", "lost", "fails")}
    assert probes.answers(refs, "a free port") == {"fine": 1}
    assert probes.silent == {
        "late": "it did not answer within 5 s while waiting for a free port",
        "lost": "it was lost while waiting for a free port",
        "fails": "a free port: OSError: no space",
    }
