"""The device of a run: GPUs of this machine, counted without an engine, or of the Ray cluster at RAY_ADDRESS."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from rl_core.devices import CPU, CUDA, Device, device_named
from rl_core.errors import ConfigError

AUTO = "auto"

_TIMEOUT_S = 3.0


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


def local_gpus() -> int:
    """Count the GPUs of this machine that this process may use, without importing an engine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1"])
    devices = Path("/dev").glob("nvidia[0-9]*")
    return len([device for device in devices if device.name.removeprefix("nvidia").isdigit()])


def check_ray_address() -> None:
    """Refuse a RAY_ADDRESS without a listener: Ray itself would retry for many minutes.

    Raises:
        ConfigError: naming the address and the remedy.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if is_host_and_port(address) and not is_answered(address, timeout_s=_TIMEOUT_S):
        raise nobody_answers(address)


def nobody_answers(address: str, reason: str = "") -> ConfigError:
    """Return the error of a run whose cluster does not answer."""
    return ConfigError(
        f"RAY_ADDRESS is {address}, but no Ray cluster answers there{f': {reason}' if reason else ''}\n"
        "Start it, or unset RAY_ADDRESS to use only this machine. If it requires a token (RPC error: "
        "InvalidAuthToken), set RAY_AUTH_MODE=token on every node before `ray start`, and on this one, with the same "
        "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN."
    )


def is_host_and_port(address: str) -> bool:
    """Return whether an address is `host:port`; Ray resolves `auto`, `local` and addresses of its client."""
    return ":" in address and "://" not in address


def is_answered(address: str, *, timeout_s: float) -> bool:
    """Return whether something listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False
