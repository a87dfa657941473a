"""Which device a run is on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.errors import ConfigError
from rl_launch.ray_address import check_ray_address, nobody_answers

AUTO = "auto"


def resolve_device(configured: str) -> Device:
    """The device that `cluster.device` names. `auto` is CUDA if there are GPUs on this machine, or on the Ray cluster
    that RAY_ADDRESS names.
    """
    if configured != AUTO:
        return device_named(configured)
    if os.environ.get("RAY_ADDRESS"):
        return _device_of_cluster()
    return CUDA if local_gpus() else CPU


def check_devices(cluster: Any) -> None:
    """Refuse a `cluster` section that asks this machine for GPUs or nodes it has not; what another Ray cluster has is
    known once Ray has connected to it.

    Raises:
        ConfigError: naming the key and the remedy.
    """
    if os.environ.get("RAY_ADDRESS") or _is_connected():
        return
    device = resolve_device(cluster.device)
    if device.is_logical:
        return
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes is {cluster.num_nodes}, but RAY_ADDRESS names no cluster; start Ray on the nodes and "
            "set RAY_ADDRESS, set cluster.num_nodes to 1, or set cluster.device to rehearsal to try it on this machine"
        )
    if not device.has_gpus:
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
    return CUDA if ray.cluster_resources().get("GPU") else CPU
