"""Environments of many nodes: one node builds, the others copy. Nodes are stand-ins that only keep account."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from rl_core.errors import WorkerEnvironmentError
from rl_core.plugins import Requirement
from rl_launch.cluster import nodes
from rl_launch.cluster.nodes import Nodes
from rl_launch.worker_envs.node_build import BuiltEnv, EnvPlan
from rl_launch.worker_envs.provision import DriverEnvs
from rl_launch.worker_envs.spec import worker_env

SPEC = worker_env(Requirement("rl-envs"), "cpu")
PLAN = EnvPlan("rl-envs", "0" * 64, (), "3.11", "none", (), files={"wheel": b"bytes"})


@dataclass
class Cluster:
    """Nodes by what they hold, and the calls to them. It stands for the module `ray` too."""

    holders: set[str] = field(default_factory=set)
    shared: bool = False
    broken: set[str] = field(default_factory=set)
    unlike: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)

    def pinned(self, function, node):
        def call(*args):
            self.calls[function.__name__] += 1
            return getattr(self, function.__name__)(node, *args)

        return SimpleNamespace(remote=call, options=lambda **_: SimpleNamespace(remote=call))

    def held(self, node, plans):
        assert all(not plan.files for plan in plans), "the driver's wheels are not sent for a question"
        there = bool(self.holders) if self.shared else node in self.holders
        return ["python" if there else None for _ in plans]

    def built(self, node, plan, parts):
        if node in self.broken or (parts is not None and node in self.unlike):
            return f"{node} has no room" if parts is None else f"the copy does not run on {node}"
        (there,) = self.held(node, [EnvPlan("", "", (), "", "", ())])
        self.calls["copies" if parts is not None else "builds"] += there is None
        self.holders.add(node)
        return BuiltEnv(f"/{node}/python", 1.0, cached=there is not None)

    def packed(self, node, plan):
        assert node in self.holders
        return iter([b"origin", b"files"])

    put = get = staticmethod(lambda value: value)

    @staticmethod
    def get_runtime_context():
        return SimpleNamespace(get_node_id=lambda: "driver")


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Give 64 nodes their environments; return their interpreters."""

    def run(cluster, count=64):
        monkeypatch.setattr(nodes, "ray", cluster)
        monkeypatch.setattr(nodes, "_pinned", cluster.pinned)
        monkeypatch.setattr(nodes, "_collect", lambda refs, *_: dict(refs))
        monkeypatch.setattr(nodes, "portable_plan", lambda spec: PLAN)
        envs = DriverEnvs("auto", {"env.math": SPEC}, {"env.math": "python"})
        found = Nodes(envs, tmp_path, model_folders={}, answer_timeout_s=1, build_timeout_s=1)
        names = [f"node{number}" for number in range(count)]
        return found._build({(name, SPEC): "it lacks it" for name in names}, {name: name for name in names})

    return run


@pytest.mark.parametrize("count", [1, 2, 64])
def test_one_node_builds_and_the_others_copy_in_calls_that_grow_with_the_nodes(build, count):
    cluster = Cluster()
    pythons = build(cluster, count)
    assert pythons == {(f"node{number}", SPEC): f"/node{number}/python" for number in range(count)}
    assert (cluster.calls["builds"], cluster.calls["copies"]) == (1, count - 1)
    assert cluster.calls["packed"] == (count > 1)
    assert cluster.calls["held"] <= 2 * (count + 1)


def test_an_environment_that_a_node_has_is_not_built(build):
    cluster = Cluster(holders={"node7"})
    build(cluster)
    assert (cluster.calls["builds"], cluster.calls["copies"]) == (0, 63)
    of_driver = Cluster(holders={"driver"})
    build(of_driver)
    assert (of_driver.calls["builds"], of_driver.calls["copies"]) == (0, 64)


def test_nothing_is_copied_if_all_nodes_see_one_folder_of_environments(build):
    cluster = Cluster(shared=True)
    build(cluster)
    assert (cluster.calls["builds"], cluster.calls["copies"], cluster.calls["packed"]) == (1, 0, 0)


def test_a_node_where_the_copy_does_not_run_builds_its_own(build, caplog):
    cluster = Cluster(unlike={"node5"})
    build(cluster)
    assert (cluster.calls["builds"], cluster.calls["copies"]) == (2, 62)
    assert "node node5: environment rl-envs is built there: the copy does not run on node5" in caplog.text


def test_a_node_that_can_neither_copy_nor_build_is_named(build):
    with pytest.raises(WorkerEnvironmentError, match=r"node node5, environment rl-envs: node5 has no room"):
        build(Cluster(broken={"node5"}, unlike={"node5"}))
