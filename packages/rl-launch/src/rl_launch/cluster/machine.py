"""This machine as a run finds it, read without an engine: its GPUs, and whether a cluster answers at RAY_ADDRESS."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rl_core.errors import ConfigError

_TIMEOUT_S = 3.0


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
