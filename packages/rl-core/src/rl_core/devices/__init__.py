"""The kinds of device that models run on: one object per kind holds everything that differs between them.

A `Device` has a half for the launcher (bundles, environment variables, which extras an engine needs), which imports
nothing, and a half for the process that computes (torch device, process groups, memory), which imports torch when it is
called.
"""

from __future__ import annotations

from rl_core.devices.device import NODE_ADDRESS as NODE_ADDRESS
from rl_core.devices.device import Device as Device
from rl_core.devices.device import DeviceMemory as DeviceMemory
from rl_core.devices.kinds import CpuDevice, CudaDevice, RehearsalDevice

CPU, CUDA, REHEARSAL = CpuDevice(), CudaDevice(), RehearsalDevice()
"""The kinds of devices: processors, NVIDIA GPUs, and processors in place of GPUs."""

DEVICES: dict[str, Device] = {device.name: device for device in (CPU, CUDA, REHEARSAL)}
"""Every kind by name, at index 0."""


def device_named(name: str) -> Device:
    """Return the device of this kind, at index 0.

    Raises:
        ValueError: If the kind does not exist; the message lists those that do.
    """
    if name not in DEVICES:
        raise ValueError(f"{name!r} is not a kind of device; use one of {', '.join(DEVICES)}")
    return DEVICES[name]
