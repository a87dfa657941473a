"""Several Ray nodes on this machine, shared by the tests that need them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import typer.testing

from rl_core.testing.exhaustive import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

# builds the commands of an app anew at every call, which takes longer than most of them
typer.testing._get_command = cache(typer.testing._get_command)

# Ray reads them when it is imported
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

OF_THE_HEAD = {
    # a dead node is noticed within seconds
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "1000",
    # no process waits for work that may not come
    "RAY_prestart_worker_first_driver": "0",
}
"""Settings that Ray's head reads."""


@dataclass
class Machines:
    """A cluster whose head, with the driver, has CPUs alone, and whose other nodes have logical GPUs too."""

    cluster: object
    folder: Path
    num_added: int = 0

    def add(self, *, num_gpus=2, **variables):
        """Ray's node of a new node, with an RL_HOME of its own and these variables in its environment."""
        self.num_added += 1
        home = self.folder / f"home-{self.num_added}"
        return self.cluster.add_node(
            node_ip_address=f"127.0.0.{self.num_added + 1}",
            num_cpus=4,
            num_gpus=num_gpus,
            object_store_memory=80 * 2**20,
            env_vars={"RL_HOME": str(home), **variables},
        )

    def home_of(self, node):
        """The RL_HOME of a node."""
        return self.folder / f"home-{int(node.node_ip_address.rpartition('.')[2]) - 1}"


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Iterator[Machines]:
    """A head alone; nodes are added by the tests."""
    import ray
    from ray.cluster_utils import Cluster

    from rl_launch.cluster.ray_start import retried

    before = {name: os.environ.get(name) for name in (*OF_THE_HEAD, "RAY_ADDRESS")}
    os.environ.update(OF_THE_HEAD)
    os.environ.pop("RAY_ADDRESS", None)
    cluster = Cluster(initialize_head=False)
    head = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    try:
        retried(lambda: cluster.add_node(**head), lambda: None)
        retried(lambda: ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR"), ray.shutdown)
        yield Machines(cluster, tmp_path_factory.mktemp("machines"))
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
