"""Keeper of the Ray nodes that a run starts for itself: `python -m rl_launch.cluster.node_keeper NODES DRIVER`."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray.cluster_utils import Cluster

from rl_core.errors import RLError
from rl_launch.cluster.ray_files import remove_session
from rl_launch.cluster.ray_start import retried

_POLL_S = 1.0

END_S = 15.0
"""Maximum seconds that this process outlives the driver; the kernel ends Ray's processes with it."""

_ESSENTIAL = (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET)


def keep(nodes: Sequence[Mapping[str, Any]], driver: int) -> None:
    """Start nodes, write their address or the error to standard output, and end them with the driver.

    Args:
        nodes: Settings of each node, for `Cluster.add_node`.
        driver: Process id of the driver, by itself: it may have ended before this process could ask for its parent.
    """
    threading.Thread(target=_end_after, args=(driver,), daemon=True).start()
    # Nothing else may write to the pipe of the answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.getLogger("ray").setLevel(logging.ERROR)
    cluster = Cluster(shutdown_at_exit=True)
    answer = {}
    try:
        for settings in nodes:
            retried(partial(cluster.add_node, **settings), partial(_remove_others, cluster, cluster.list_all_nodes()))
        answer["address"] = cluster.address
    except RLError as error:
        answer["problem"] = str(error)
    try:
        is_awaited = True
        try:
            with answers:
                answers.write(json.dumps(answer))
        except BrokenPipeError:
            # A signal has ended the driver, or its wait, meanwhile.
            is_awaited = False
        # A process that the driver forked may hold the pipe open for longer than the driver lives.
        while is_awaited and not select.select([sys.stdin], [], [], _POLL_S)[0] and os.getppid() == driver:
            pass
    finally:
        # Remove the session of the nodes. Its logs stay if a process of Ray's had died, because they show the reason.
        known = cluster.list_all_nodes()
        died = any(name in _ESSENTIAL for node in known for name, _ in node.dead_processes())
        sessions = {Path(node.get_session_dir_path()) for node in known}
        cluster.shutdown()
        for session in sessions:
            remove_session(session, keep_logs=died)


def _end_after(driver: int) -> None:
    """End this process some time after the driver: a Ray that does not start, or does not end, never returns."""
    while os.getppid() == driver:
        time.sleep(_POLL_S)
    time.sleep(END_S)
    os._exit(1)


def _remove_others(cluster: Cluster, known: Sequence[Any]) -> None:
    for node in cluster.list_all_nodes():
        if node not in known:
            cluster.remove_node(node)


if __name__ == "__main__":
    keep(json.loads(sys.argv[1]), int(sys.argv[2]))
