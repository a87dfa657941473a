"""NVIDIA's driver, queried through nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from xml.etree import ElementTree

_TIMEOUT_S = 20.0

_OLDEST = {12: 525, 13: 580}
"""Oldest driver by major version of CUDA
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver sees it.

    Args:
        name: Name of the product.
        memory_bytes: Memory of the device; None if the driver does not report it.
        used_bytes: Memory in use; None likewise.
    """

    name: str
    memory_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True)
class GpuDriver:
    """NVIDIA's driver.

    Args:
        version: Version of the driver.
        cuda: Newest CUDA version it runs, `13.0`.
        gpus: Every GPU of the machine.
    """

    version: str
    cuda: str
    gpus: tuple[Gpu, ...]


def driver_remedy(driver_cuda: str, cuda: str) -> str:
    """Return the remedy if a driver for one version of CUDA cannot run a build for another; empty if it can.

    With NVIDIA's package for forward compatibility on the path of the loader, a driver reports that package's version.
    """
    major = _major(cuda)
    if not driver_cuda or _major(driver_cuda) >= major:
        return ""
    oldest = f"version {_OLDEST[major]}" if major in _OLDEST else f"one for CUDA {major}"
    package = f"cuda-compat-{cuda.replace('.', '-')}"
    return (
        f"Update the NVIDIA driver to {oldest} or later, or on data centre GPUs install {package} and put "
        f"/usr/local/cuda-{cuda}/compat on LD_LIBRARY_PATH of every node."
    )


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdigit() else 0


def ask_driver() -> GpuDriver | None:
    """Return the report of nvidia-smi; None if it is not installed.

    Raises:
        OSError: If it fails, with its message.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-q", "-x"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"nvidia-smi did not answer within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise OSError(f"nvidia-smi ended with exit code {done.returncode}: {said[0] if said else 'it printed nothing'}")
    return read_log(done.stdout)


def read_log(text: str) -> GpuDriver:
    """Read the XML of `nvidia-smi -q -x`."""
    log = ElementTree.fromstring(text)
    gpus = [
        Gpu(
            gpu.findtext("product_name", "unknown"),
            _bytes(gpu.findtext("fb_memory_usage/total", "")),
            _bytes(gpu.findtext("fb_memory_usage/used", "")),
        )
        for gpu in log.findall("gpu")
    ]
    return GpuDriver(log.findtext("driver_version", ""), log.findtext("cuda_version", ""), tuple(gpus))


def _bytes(text: str) -> int | None:
    """Return the number of bytes for a string such as `143771 MiB`; None for `N/A`."""
    number, _, unit = text.partition(" ")
    return int(number) * 2**20 if number.isdigit() and unit == "MiB" else None
