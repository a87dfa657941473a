"""GPUs of this machine, counted without an engine."""

from __future__ import annotations

import os
from pathlib import Path


def local_gpus() -> int:
    """GPUs of this machine that this process may use, without importing an engine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu.strip() and gpu.strip() != "-1"])
    devices = Path("/dev").glob("nvidia[0-9]*")
    return len([device for device in devices if device.name.removeprefix("nvidia").isdigit()])
