"""The device of a run."""

from __future__ import annotations

import os
import sys
from typing import Any

from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.errors import ConfigError
from rl_launch.cluster.local_gpus import local_gpus
from rl_launch.cluster.ray_address import check_ray_address

AUTO = "auto"


def resolve_device(cluster: Any) -> Device:
    """The device of a `cluster` section. `auto` is CUDA if there are GPUs on this machine, or, if RAY_ADDRESS names a
    Ray cluster, on any of its nodes.

    Raises:
        ConfigError: If it is `auto` on a cluster that has no GPU now and may add some.
    """
    if cluster.device != AUTO:
        return device_named(cluster.device)
    if os.environ.get("RAY_ADDRESS"):
        return _device_of_cluster(autoscaling=cluster.autoscaling)
    return CUDA if local_gpus() else CPU


def check_devices(cluster: Any) -> None:
    """Refuse a `cluster` section that asks for GPUs or nodes that this machine does not have. Those of another Ray
    cluster are known once Ray has connected to it.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    if os.environ.get("RAY_ADDRESS") or _is_connected():
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
        raise ConfigError(
            "cluster.device is cuda, but no GPU is visible on this machine (see CUDA_VISIBLE_DEVICES); "
            "set cluster.device to cpu or auto"
        )
    if cluster.gpus_per_node > num_gpus:
        raise ConfigError(
            f"cluster.gpus_per_node is {cluster.gpus_per_node}, but this machine has {num_gpus} visible; "
            "lower it, or make more visible with CUDA_VISIBLE_DEVICES"
        )


def _is_connected() -> bool:
    # a process that has not imported Ray is not connected either, and need not wait for the import
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _device_of_cluster(*, autoscaling: bool) -> Device:
    check_ray_address()
    # importing Ray takes a second; `rl_launch.cluster.virtual_cluster` sets what Ray reads at its import
    from rl_launch.cluster.virtual_cluster import gpus_of_cluster

    if gpus_of_cluster():
        return CUDA
    if autoscaling:
        raise ConfigError(
            "cluster.device is auto, but the cluster at RAY_ADDRESS has no GPU now and may add some "
            "(cluster.autoscaling is true). Set cluster.device to cuda or cpu"
        )
    return CPU
