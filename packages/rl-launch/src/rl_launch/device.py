"""Which device a run is on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]


def resolve_device(configured: str) -> Device:
    """`cuda` or `cpu`; `auto` is CUDA where this machine, or the Ray cluster that RAY_ADDRESS names, has GPUs."""
    if configured != "auto":
        return "cuda" if configured == "cuda" else "cpu"
    if os.environ.get("RAY_ADDRESS"):
        return _device_of_cluster()
    return "cuda" if local_gpus() else "cpu"


def local_gpus() -> int:
    """GPUs of this machine that this process may use, without importing an engine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1"])
    devices = Path("/dev").glob("nvidia[0-9]*")
    return len([device for device in devices if device.name.removeprefix("nvidia").isdigit()])


def _device_of_cluster() -> Device:
    import ray

    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False)
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
