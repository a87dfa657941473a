from types import SimpleNamespace

import pytest

from rl_core.errors import ConfigError
from rl_core.plugins import algorithm_named
from rl_launch.backends import Backends
from rl_launch.cluster.device import check_devices
from rl_launch.commands.evaluate import evaluate
from rl_launch.root_config import ClusterConfig
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session.config import LoggerConfig


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("visible", "settings", "message"),
    [
        ("", {"device": "cuda"}, "no GPU"),
        ("0,1", {"device": "cuda", "gpus_per_node": 4}, "this machine has 2 visible"),
        ("0,1", {"gpus_per_node": 4}, "cluster.gpus_per_node is 4"),
        ("", {"num_nodes": 2}, "RAY_ADDRESS is not set"),
    ],
)
def test_devices_that_this_machine_has_not_are_refused(monkeypatch, visible, settings, message):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=message):
        check_devices(ClusterConfig(**settings))


@pytest.mark.parametrize(
    ("visible", "settings"),
    [("", {"gpus_per_node": 4}), ("0,1", {"gpus_per_node": 2}), ("0", {"device": "cpu", "cpu_ranks_per_node": 9})],
)
def test_devices_that_this_machine_has_are_not(monkeypatch, visible, settings):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check_devices(ClusterConfig(**settings))


def test_an_evaluation_asks_before_it_loads_anything(tmp_path):
    config = SimpleNamespace(cluster=ClusterConfig(num_nodes=2), logger=LoggerConfig())
    plan = RunPlan(config, algorithm_named("grpo"), Backends({}))
    with pytest.raises(ConfigError, match="RAY_ADDRESS is not set"):
        evaluate(plan, folder=tmp_path)


def test_what_another_cluster_has_is_its_own_affair(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_devices(ClusterConfig(device="cuda", num_nodes=8, gpus_per_node=8))
