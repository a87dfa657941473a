"""The device of a run, on this machine or on the Ray cluster at RAY_ADDRESS."""

from __future__ import annotations

import os
import sys
from typing import Any

from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.errors import ConfigError
from rl_launch.cluster.machine import check_ray_address, local_gpus

AUTO = "auto"


def resolve_device(cluster: Any) -> Device:
    """Return the device of a `cluster` section. `auto` is CUDA if there are GPUs on this machine, or, with RAY_ADDRESS,
    on any node of that Ray cluster.

    Raises:
        ConfigError: If it is `auto` on a cluster that has no GPU now and may add some.
    """
    if cluster.device != AUTO:
        return device_named(cluster.device)
    if not os.environ.get("RAY_ADDRESS"):
        return CUDA if local_gpus() else CPU
    check_ray_address()
    # Importing Ray takes a second; `rl_launch.cluster.virtual_cluster` sets variables that Ray reads at its import.
    from rl_launch.cluster.virtual_cluster import gpus_of_cluster

    if gpus_of_cluster():
        return CUDA
    if cluster.autoscaling:
        raise ConfigError(
            "cluster.device is auto, but the cluster at RAY_ADDRESS has no GPU now and may add some "
            "(cluster.autoscaling is true). Set cluster.device to cuda or cpu"
        )
    return CPU


def check_devices(cluster: Any) -> None:
    """Refuse a `cluster` section that asks for GPUs or nodes that this machine does not have. The devices of another
    Ray cluster are known once Ray has connected to it.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    # A process that has not imported Ray is not connected either, and need not wait for the import.
    is_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if os.environ.get("RAY_ADDRESS") or is_connected:
        return
    device = resolve_device(cluster)
    if device.is_logical:
        return
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes is {cluster.num_nodes}, but RAY_ADDRESS is not set; start Ray on the nodes and "
            "set RAY_ADDRESS, set cluster.num_nodes to 1, or set cluster.device to rehearsal to try it on this machine"
        )
    if not device.has_gpus:
        return
    num_gpus = local_gpus()
    if not num_gpus:
        problem = "cluster.device is cuda, but no GPU is visible on this machine (see CUDA_VISIBLE_DEVICES)"
        raise ConfigError(f"{problem}; set cluster.device to cpu or auto")
    if cluster.gpus_per_node > num_gpus:
        problem = f"cluster.gpus_per_node is {cluster.gpus_per_node}, but this machine has {num_gpus} visible"
        raise ConfigError(f"{problem}; lower it, or make more visible with CUDA_VISIBLE_DEVICES")
