"""Nodes are real ones of Ray, on this machine; a path under /proc/self/cwd is seen by the driver alone."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

import rl_envs
from rl_core.devices import CPU, CUDA, REHEARSAL
from rl_core.errors import ConfigError, FailureOrigin, WorkerDied, WorkerEnvironmentError, WorkerStalled
from rl_core.plugins import Requirement
from rl_core.testing.exhaustive import exhaustive
from rl_launch.cluster.device import resolve_device
from rl_launch.cluster.nodes import Nodes, log_places
from rl_launch.cluster.start_wait import Bound, gather_start
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.placement.bundles import PlacementError, PlacementTimeouts
from rl_launch.root_config import ClusterConfig
from rl_launch.worker_envs.provision import DriverEnvs
from rl_launch.worker_envs.spec import worker_env

MATH = worker_env(Requirement("rl-envs", imports=("math_verify",)), "cpu")
DRIVERS_OWN = DriverEnvs("shared", {"env.math": MATH}, {"env.math": sys.executable})
UNSEEN = Path("/proc/self/cwd")


@pytest.fixture(scope="module")
def pair(machines):
    """Two nodes beside the driver's."""
    return machines.add(), machines.add(GLOO_SOCKET_IFNAME="eth7")


def cluster_of(*, num_nodes=1, ranks=2, **timeouts):
    return VirtualCluster(
        device=REHEARSAL,
        num_nodes=num_nodes,
        ranks_per_node=ranks,
        timeouts=PlacementTimeouts(**{"busy_s": 60} | timeouts),
    )


def nodes_of(envs=DRIVERS_OWN, *, folder, model_folders=None):
    return Nodes(envs, folder, model_folders=model_folders or {}, answer_timeout_s=120, build_timeout_s=300)


def on(*nodes):
    return {node.node_id: ["env.math"] for node in nodes}


def test_auto_is_the_cpu_on_a_cluster_without_gpus_unless_it_may_add_some(machines, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", machines.cluster.address)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert resolve_device(ClusterConfig()) == CPU
    with pytest.raises(ConfigError, match=r"has no GPU now and may add some .* Set cluster\.device to cuda or cpu"):
        resolve_device(ClusterConfig(autoscaling=True))
    assert resolve_device(ClusterConfig(autoscaling=True, device="cuda")) == CUDA
    with pytest.raises(ConfigError, match=r"cluster\.device is cuda, but the cluster has no GPU"):
        VirtualCluster.of(ClusterConfig(device="cuda"), CUDA)
    VirtualCluster.of(ClusterConfig(device="cuda", autoscaling=True), CUDA).close()


@exhaustive
def test_auto_is_cuda_on_a_cluster_whose_other_nodes_have_gpus(machines, pair, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", machines.cluster.address)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device(ClusterConfig()) == CUDA


def test_devices_are_reserved_node_by_node_and_what_there_is_not_is_told_at_once(pair, caplog):
    with cluster_of(num_nodes=2) as cluster:
        reserved = cluster.reserve(2, 2)
        assert {bundles[0].node for bundles in reserved} == {node.node_id for node in pair}
        assert [[cluster.node_of(bundle) for bundle in bundles] for bundles in reserved] == [
            [bundle.node for bundle in bundles] for bundles in reserved
        ]
        with caplog.at_level("INFO"):
            log_places({f"policy-{rank}": bundles[0].node for rank, bundles in enumerate(reserved)})
        assert re.search(r"node 1, 127\S+: policy-0\n.*node 2, 127\S+: policy-1\n", caplog.text)
        with pytest.raises(
            PlacementError, match=r"cluster\.gpus_per_node request 3 x 2 GPU, 2 CPU, each on one node, but"
        ):
            cluster.reserve_replicas(1, 2, least=1)
        with cluster_of(busy_s=1) as other, pytest.raises(PlacementError, match="1 of 1 were not free within 1 s"):
            other.reserve(1, 2)
    with cluster_of(num_nodes=2) as cluster:
        cluster.reserve(2, 2)


def test_replicas_begin_with_those_that_fit_and_others_are_placed_once_there_is_room(pair, monkeypatch):
    monkeypatch.setattr("rl_launch.cluster.virtual_cluster.REPLACEMENT_S", 1.0)
    with cluster_of(num_nodes=2) as cluster:
        bundles = cluster.reserve_replicas(3, 2, least=1)
        assert {bundle.node for (bundle,) in bundles} == {node.node_id for node in pair}
        requested = cluster.request_replica(2)
        assert not cluster.is_placed(requested)
        cluster.release([bundles[0]])
        deadline = time.monotonic() + 60
        while not cluster.is_placed(requested):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert cluster.node_of(requested[0]) == bundles[0][0].node


def test_a_replica_over_nodes_has_devices_of_each_and_waits_for_all_of_them(pair):
    asked = r"request 4 x 2 GPU, 2 CPU, each on one node, but .* room for 2 of 4"
    with cluster_of(num_nodes=2) as cluster, pytest.raises(PlacementError, match=asked):
        cluster.reserve_replicas(2, 2, least=2, num_nodes=2)
    with cluster_of(num_nodes=2) as cluster:
        (bundles,) = cluster.reserve_replicas(1, 2, least=1, num_nodes=2)
        assert {bundle.node for bundle in bundles} == {node.node_id for node in pair}
        assert [cluster.node_of(bundle) for bundle in bundles] == [bundle.node for bundle in bundles]
        requested = cluster.request_replica(2, 2)
        assert [bundle.index for bundle in requested] == [0, 1]
        assert not cluster.is_placed(requested)
        cluster.release([bundles])
        deadline = time.monotonic() + 60
        while not cluster.is_placed(requested):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_nodes_that_share_the_drivers_folders_and_environment_are_used_as_they_are(pair, tmp_path):
    nodes = nodes_of(folder=tmp_path)
    nodes.prepare(on(*pair))
    found = [nodes[node.node_id] for node in pair]
    assert [node.address for node in found] == [node.node_ip_address for node in pair]
    assert [dict(node.interpreters) for node in found] == [{"env.math": sys.executable}] * 2
    assert all(node.facts.cores >= 1 for node in found)
    assert [node.facts.interface for node in found] == ["lo", "lo"]
    assert [dict(node.facts.variables) for node in found] == [{}, {"GLOO_SOCKET_IFNAME": "eth7"}]
    assert not list(tmp_path.iterdir())


def test_a_run_folder_that_nodes_do_not_share_is_refused_by_their_names(pair, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_launch.cluster.nodes.SHARED_FOLDER_PATIENCE_S", 0.5)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        nodes_of(folder=UNSEEN / "run").prepare(on(*pair))
    first, second = (node.node_ip_address for node in pair)
    assert (
        f"the run's folder /proc/self/cwd/run is not shared by all nodes: on {first}, {second} it does not exist"
        in str(refused.value)
    )
    assert not list((tmp_path / "run").iterdir())


def test_a_model_folder_that_nodes_do_not_have_is_refused_by_key_and_node(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    nodes_of(folder=tmp_path / "run", model_folders={"policy.model_name": str(tmp_path / "model")}).prepare(on(*pair))
    with pytest.raises(ConfigError, match=r"policy\.model_name: /proc/self/cwd/model .* it does not exist\. Put it on"):
        nodes_of(folder=tmp_path / "run", model_folders={"policy.model_name": str(UNSEEN / "model")}).prepare(on(*pair))


@pytest.fixture
def driver_alone(tmp_path, monkeypatch):
    """An interpreter with the test's own packages that only the driver sees."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", "here"], cwd=tmp_path, check=True
    )
    (site,) = (tmp_path / "here" / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text("\n".join(path for path in sys.path if path.startswith("/")))
    monkeypatch.chdir(tmp_path)
    return str(UNSEEN / "here" / "bin" / "python")


@exhaustive
def test_nodes_without_the_drivers_environment_build_it_once_and_copy_it(
    machines, pair, driver_alone, tmp_path, caplog
):
    caplog.set_level("INFO", logger="rl_launch")
    envs = DriverEnvs("isolated", {"env.math": MATH}, {"env.math": driver_alone})
    first, second = pair
    for how in ("built in", "cached"):
        caplog.clear()
        nodes = nodes_of(envs, folder=tmp_path)
        nodes.prepare(on(second))
        assert ("building environment rl-envs there: " in caplog.text) == (how == "built in")
        assert f"node {second.node_ip_address}: environment rl-envs: {how}" in caplog.text
    caplog.clear()
    nodes.prepare(on(first, second))
    assert f"node {first.node_ip_address}: environment rl-envs: copied in" in caplog.text
    assert "building environment" not in caplog.text
    for node in pair:
        python = nodes[node.node_id].interpreters["env.math"]
        assert Path(python).is_relative_to(machines.home_of(node) / "envs")
        seen = subprocess.run(
            [python, "-I", "-c", "import rl_envs; print(rl_envs.__file__)"], capture_output=True, text=True
        )
        # It is a copy of the driver's code.
        module = Path(seen.stdout.strip())
        assert module.is_relative_to(machines.home_of(node))
        assert module.read_bytes() == Path(rl_envs.__file__).read_bytes()


def test_a_shared_environment_that_is_not_shared_is_refused_by_node(pair, driver_alone, tmp_path):
    envs = DriverEnvs("shared", {"env.math": MATH}, {"env.math": driver_alone})
    with pytest.raises(WorkerEnvironmentError) as refused:
        nodes_of(envs, folder=tmp_path).prepare(on(pair[0]))
    assert f"node {pair[0].node_ip_address}, rl-envs: {driver_alone} does not exist there" in str(refused.value)
    assert "cluster.worker_envs=auto" in str(refused.value)


@pytest.fixture(scope="module")
def spare(machines):
    """A node on which no environment can be built."""
    return machines.add(num_gpus=3, RL_HOME="/dev/null/home")


def test_a_build_that_fails_names_the_node_and_the_remedy(spare, driver_alone, tmp_path):
    envs = DriverEnvs("isolated", {"env.math": MATH}, {"env.math": driver_alone})
    with pytest.raises(WorkerEnvironmentError) as refused:
        nodes_of(envs, folder=tmp_path).prepare(on(spare))
    assert f"node {spare.node_ip_address}, environment rl-envs: [Errno 20] Not a directory" in str(refused.value)
    assert "Check the node's network and disk" in str(refused.value)


def test_a_node_that_dies_meanwhile_is_named_and_known_to_be_lost(spare, pair, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_launch.cluster.virtual_cluster.REPLACEMENT_S", 1.0)
    cluster = cluster_of()
    ((bundle,),) = cluster.reserve_replicas(1, 3, least=1)
    nodes, before = nodes_of(folder=tmp_path), nodes_of(folder=tmp_path)
    before.prepare(on(spare, pair[0]))
    assert before.lost() == []
    spare.kill_raylet()
    with pytest.raises(WorkerDied, match=f"node {spare.node_ip_address} was lost while waiting for"):
        nodes.prepare(on(spare))
    assert before.lost() == [spare.node_ip_address]
    before.leave(spare.node_id, ["env.math"])
    assert before.lost() == []
    with pytest.raises(WorkerDied, match="no other node has such devices free"):
        cluster.node_of(bundle)
    cluster.close()


@pytest.mark.parametrize("report_s", [0.2, 60.0])
def test_a_wait_for_a_start_says_who_is_missing_and_ends_with_its_key(machines, caplog, monkeypatch, report_s):
    monkeypatch.setattr("os.getloadavg", lambda: (40.0, 30.0, 20.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    caplog.set_level("INFO", logger="rl_launch")
    monkeypatch.setattr("rl_launch.cluster.start_wait.REPORT_S", report_s)
    done, sleep = ray.put(1), ray.remote(lambda: time.sleep(1000)).options(num_cpus=0)
    never = [sleep.remote(), sleep.remote()]
    origins = [FailureOrigin("policy", rank, "10.0.0.2", "start") for rank in range(3)]
    with pytest.raises(WorkerStalled) as stalled:
        gather_start([done, *never], origins, Bound(1.0, "cluster.start_timeout_s"), "loading policy")
    assert str(stalled.value) == (
        "policy rank 1 on 10.0.0.2 during start: loading policy did not finish within 1 s (cluster.start_timeout_s); 1 "
        "more did not finish either"
    )
    waits = [message for message in caplog.messages if message.startswith("still waiting for loading policy after")]
    assert bool(waits) == (report_s < 1)
    who = "policy rank 1 on 10.0.0.2 and 1 more (this machine is busy: a load of 40 on 2 CPUs)"
    assert all(wait.endswith(f" s: {who}") for wait in waits)
    for each in never:
        ray.cancel(each, force=True)
    assert gather_start([done], origins[:1], Bound(1.0, "key"), "x") == [1]
