"""Which device a run is on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

from rl_core.errors import ConfigError
from rl_launch.ray_address import check_ray_address, nobody_answers

Device = Literal["cpu", "cuda"]


def resolve_device(configured: str) -> Device:
    """`cuda` or `cpu`; `auto` is CUDA where this machine, or the Ray cluster that RAY_ADDRESS names, has GPUs."""
    if configured != "auto":
        return "cuda" if configured == "cuda" else "cpu"
    if os.environ.get("RAY_ADDRESS"):
        return _device_of_cluster()
    return "cuda" if local_gpus() else "cpu"


def check_devices(cluster: Any) -> None:
    """Refuse a `cluster` section that asks this machine for GPUs or nodes it has not; what another Ray cluster has is
    known once Ray has connected to it.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    if os.environ.get("RAY_ADDRESS") or _is_connected():
        return
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes is {cluster.num_nodes}, but RAY_ADDRESS names no cluster; "
            "start Ray on the nodes and set RAY_ADDRESS, or set cluster.num_nodes to 1"
        )
    if resolve_device(cluster.device) == "cpu":
        return
    num_gpus = local_gpus()
    if not num_gpus:
        raise ConfigError(
            "cluster.device is cuda, but this machine has no GPU that CUDA_VISIBLE_DEVICES shows; "
            "set cluster.device to cpu or auto"
        )
    if cluster.gpus_per_node > num_gpus:
        raise ConfigError(
            f"cluster.gpus_per_node is {cluster.gpus_per_node}, but this machine has {num_gpus} that may be used; "
            "lower it, or see CUDA_VISIBLE_DEVICES"
        )


def local_gpus() -> int:
    """GPUs of this machine that this process may use, without importing an engine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1"])
    devices = Path("/dev").glob("nvidia[0-9]*")
    return len([device for device in devices if device.name.removeprefix("nvidia").isdigit()])


def _is_connected() -> bool:
    # whoever has not imported Ray has not connected it either, and need not wait for the import
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _device_of_cluster() -> Device:
    check_ray_address()
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise nobody_answers(os.environ["RAY_ADDRESS"], str(error)) from None
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
