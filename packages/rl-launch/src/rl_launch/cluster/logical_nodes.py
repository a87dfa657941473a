"""Several Ray nodes with logical GPUs on this machine."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

from ray.cluster_utils import Cluster

from rl_core.errors import ConfigError
from rl_launch.cluster.ray_start import object_store_bytes, retried, sessions_of_their_own

_log = logging.getLogger(__name__)

FIRST_ADDRESS = 2
"""Of the loopback network 127.0.0.0/8; Ray replaces 127.0.0.1 by an address of the machine."""

MOST_NODES = 32
"""Ray's own processes take about 0.2 GiB for each node."""

LEAST_OBJECT_STORE_BYTES = 80 * 2**20


class LogicalNodes:
    """A Ray cluster whose nodes are processes of this machine, each with an address and a number of GPUs of its own.

    They end with this object, and with the process that made it.

    Args:
        num_nodes: nodes.
        gpus_per_node: GPUs that each tells Ray it has.

    Raises:
        ConfigError: for more nodes than a machine bears.
    """

    def __init__(self, num_nodes: int, gpus_per_node: int) -> None:
        if num_nodes > MOST_NODES:
            raise ConfigError(
                f"cluster.num_nodes is {num_nodes}, but a rehearsal has at most {MOST_NODES} nodes on one machine; "
                "lower it, or set RAY_ADDRESS to a cluster whose nodes have logical GPUs"
            )
        settings: dict[str, Any] = {
            # bundles take a CPU for each GPU; environments and tasks take further ones
            "num_cpus": 2 * gpus_per_node + (os.cpu_count() or 1),
            "num_gpus": gpus_per_node,
            "object_store_memory": max(LEAST_OBJECT_STORE_BYTES, object_store_bytes() // num_nodes),
        }
        _log.info("starting %d Ray nodes with %d logical GPUs each", num_nodes, gpus_per_node)
        logging.getLogger("ray").setLevel(logging.ERROR)
        self._cluster = Cluster(shutdown_at_exit=True)
        try:
            with sessions_of_their_own():
                for node in range(num_nodes):
                    address = f"127.0.0.{FIRST_ADDRESS + node}"
                    retried(partial(self._add_node, address, settings), _nothing_is_left)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """For `ray.init`."""
        return str(self._cluster.address)

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def _add_node(self, address: str, settings: dict[str, Any]) -> None:
        head = {} if self._cluster.head_node else {"include_dashboard": False}
        self._cluster.add_node(node_ip_address=address, **settings, **head)


def _nothing_is_left() -> None:
    """Ray ends the processes of a node that did not start."""
