import socket

import pytest

from rl_core.devices import CPU
from rl_core.errors import ConfigError
from rl_launch.cluster.device import resolve_device
from rl_launch.cluster.machine import check_ray_address
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.root_config import ClusterConfig


@pytest.fixture
def stale(monkeypatch):
    """RAY_ADDRESS names a port that was Ray's and that nobody listens at."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield address


@pytest.mark.parametrize(
    "connect",
    [
        check_ray_address,
        lambda: resolve_device(ClusterConfig()),
        lambda: VirtualCluster(device=CPU, num_nodes=1, ranks_per_node=1),
    ],
    ids=["at once", "to see its devices", "to run there"],
)
@pytest.mark.timeout(20)  # Ray itself would take many minutes
def test_a_cluster_that_is_no_more_is_refused(stale, connect):
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS is {stale}, but no Ray cluster answers there\n.*unset"):
        connect()


@pytest.mark.parametrize("address", [None, "", "auto", "local", "ray://far:10001"])
def test_what_ray_itself_must_look_up_is_left_to_it(monkeypatch, address):
    if address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", address)
    check_ray_address()


def test_an_address_where_something_listens_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("RAY_ADDRESS", f"localhost:{listener.getsockname()[1]}")
        check_ray_address()
