"""The machine that this process runs on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import psutil

from rl_core.environments.instance import EnvironmentInstance, machine_check_of
from rl_core.plugins import KINDS, load_problem, names
from rl_launch.cluster.machine import is_answered, local_gpus
from rl_launch.cluster.process_limit import ProcessLimit, process_limit
from rl_launch.cluster.ray_files import ray_folder, token_problem
from rl_launch.doctor.room import Room, room
from rl_launch.worker_envs.driver import missing, project_distributions
from rl_launch.worker_envs.node_build import EnvBuildError, clean_environment, default_root, find_uv
from rl_launch.worker_envs.provision import Availability, Mode, availability_of
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec

_TIMEOUT_S = 5.0
_DRIVER_TIMEOUT_S = 20.0
_CONTROL_GROUP = Path("/sys/fs/cgroup")

_OLDEST = {12: 525, 13: 580}
"""Oldest driver by major version of CUDA
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)."""


class InstalledTool(NamedTuple):
    """An installed program.

    Attributes:
        path: Path of its executable.
        version: Version that the program prints.
    """

    path: str
    version: str


class Gpu(NamedTuple):
    """A GPU as its driver sees it.

    Attributes:
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


class Machine:
    """The machine that this process runs on; a property is read from the system, whose errors it may raise."""

    def __init__(self) -> None:
        self._availability: dict[tuple[tuple[WorkerEnvSpec, ...], Mode], Mapping[WorkerEnvSpec, Availability]] = {}

    @property
    def python(self) -> str:
        """Version of the interpreter."""
        return platform.python_version()

    @property
    def supported_python(self) -> str:
        """Versions that rl-launch runs on, from its metadata: `>=3.11,<3.14`."""
        return str(importlib.metadata.metadata("rl-launch")["Requires-Python"])

    @property
    def unmet(self) -> Sequence[str]:
        """Requirements of this project's packages that their own environment does not meet, in words. pip checks them
        when it installs a package, but not with `--no-deps`."""
        return missing(WorkerEnvSpec(tuple(map(Wanted, project_distributions())), ()))

    @property
    def broken_plugins(self) -> Sequence[str]:
        """Plugins of installed packages that cannot be used, in words."""
        return [problem for group in KINDS for name in names(group) if (problem := load_problem(group, name))]

    @property
    def ray(self) -> str | None:
        """Version of ray; None if it is not installed."""
        try:
            return importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def ray_address(self) -> str:
        """The cluster at RAY_ADDRESS; empty if it is not set."""
        return os.environ.get("RAY_ADDRESS", "")

    def answers(self, address: str) -> bool:
        """Return whether something listens at `host:port`."""
        return is_answered(address, timeout_s=1.0)

    @property
    def ray_processes(self) -> Sequence[int]:
        """Ids of the processes of any Ray cluster on this machine."""
        return [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]

    @property
    def ray_folder(self) -> Path:
        """Folder of Ray's sockets, logs and spilled objects."""
        return ray_folder()

    @property
    def token_problem(self) -> tuple[str, str] | None:
        """Why others can take the token of this user's Ray clusters, and the remedy; None if they cannot."""
        return token_problem()

    @cached_property
    def uv(self) -> InstalledTool | None:
        """The program that builds environments; None if it is not installed."""
        try:
            path = find_uv()
        except (EnvBuildError, FileNotFoundError):
            return None
        return InstalledTool(path, _output_of(path, "--version").removeprefix("uv ").partition(" ")[0])

    @property
    def num_gpus(self) -> int:
        """GPUs that this process may use."""
        return local_gpus()

    @cached_property
    def gpu_driver(self) -> GpuDriver | None:
        """NVIDIA's driver; None if there is no driver to ask."""
        return ask_driver()

    @property
    def has_cuda_compiler(self) -> bool:
        """True if nvcc is on the path, or in the folder of a CUDA toolkit."""
        homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
        return any(shutil.which("nvcc", path=home and f"{home}/bin") for home in (None, *filter(None, homes)))

    def availability(self, specs: Iterable[WorkerEnvSpec], mode: Mode) -> Mapping[WorkerEnvSpec, Availability]:
        """Return the availability of each environment."""
        asked = (tuple(specs), mode)
        if asked not in self._availability:
            self._availability[asked] = availability_of(*asked)
        return self._availability[asked]

    @property
    def shared_memory(self) -> Room | None:
        """/dev/shm; None if there is none."""
        folder = Path("/dev/shm")
        return self.space(folder) if folder.is_dir() else None

    def space(self, folder: Path) -> Room:
        """Return the room in a folder."""
        return room(folder.absolute())

    @property
    def home(self) -> Path:
        """RL_HOME, or the folder that is used if it is not set."""
        return default_root().parent

    @property
    def uv_cache(self) -> Path | None:
        """uv's cache folder; None if there is no uv."""
        return Path(_output_of(self.uv.path, "cache", "dir")) if self.uv else None

    def open_ports(self, count: int) -> None:
        """Listen on this many free loopback ports at one time, and connect to one; raises `OSError` if that fails."""
        with ExitStack() as opened:
            listening = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            opened.enter_context(socket.create_connection(listening[-1].getsockname(), timeout=_TIMEOUT_S))

    def environment_problem(self, environment: EnvironmentInstance) -> str | None:
        """Return why an environment cannot run here, and what to do; an empty string if it can, None if it needs
        nothing of the machine."""
        check = machine_check_of(environment)
        return None if check is None else check()

    @property
    def process_limit(self) -> ProcessLimit | None:
        """The tightest limit of processes and threads; None if there is none."""
        return process_limit()

    @property
    def open_files(self) -> tuple[int, int]:
        """Maximum number of files that a process can open, and the limit to increase it."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
        return soft, hard

    @property
    def memory_bytes(self) -> int:
        """Memory of the machine, or of the container if that is less."""
        limit = _control("memory.max") or _control("memory/memory.limit_in_bytes")
        total = psutil.virtual_memory().total
        return min(total, int(limit)) if limit.isdigit() else total

    @property
    def available_bytes(self) -> int:
        """Memory that is not in use."""
        return min(psutil.virtual_memory().available, self.memory_bytes)

    @property
    def cores(self) -> float:
        """Cores that this process may use, a container's share in fractions."""
        quota, _, period = _control("cpu.max").partition(" ")
        if not quota:
            quota, period = _control("cpu/cpu.cfs_quota_us"), _control("cpu/cpu.cfs_period_us")
        usable = float(len(os.sched_getaffinity(0)))
        return min(usable, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else usable


def _output_of(*command: str) -> str:
    env = clean_environment()
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S, check=True)
    return done.stdout.strip()


def _control(name: str) -> str:
    """Return a limit of the control group, of version 2 or 1, as written in its file; empty if there is none."""
    path = _CONTROL_GROUP / name
    return path.read_text().strip() if path.is_file() else ""


def driver_remedy(driver_cuda: str, cuda: str) -> str:
    """Return the remedy if a driver for one version of CUDA cannot run a build for another; empty if it can.

    With NVIDIA's package for forward compatibility on the path of the loader, a driver reports that package's version.
    """
    major, own = (int(number) if (number := each.partition(".")[0]).isdigit() else 0 for each in (cuda, driver_cuda))
    if not driver_cuda or own >= major:
        return ""
    oldest = f"version {_OLDEST[major]}" if major in _OLDEST else f"one for CUDA {major}"
    package = f"cuda-compat-{cuda.replace('.', '-')}"
    return (
        f"Update the NVIDIA driver to {oldest} or later, or on data centre GPUs install {package} and put "
        f"/usr/local/cuda-{cuda}/compat on LD_LIBRARY_PATH of every node."
    )


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs, as the driver has them; empty if it does not answer."""
    with suppress(OSError):
        driver = ask_driver()
        return [gpu.name for gpu in driver.gpus] if driver is not None else []
    return []


def ask_driver() -> GpuDriver | None:
    """Return the report of nvidia-smi; None if it is not installed.

    Raises:
        OSError: If it fails, with its message.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-q", "-x"], capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"nvidia-smi did not answer within {_DRIVER_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        printed = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
        raise OSError(f"nvidia-smi ended with exit code {done.returncode}: {printed[0]}")
    return read_log(done.stdout)


def read_log(text: str) -> GpuDriver:
    """Read the XML of `nvidia-smi -q -x`."""
    log = ElementTree.fromstring(text)
    gpus = []
    for gpu in log.findall("gpu"):
        memory = (_bytes(gpu.findtext(f"fb_memory_usage/{name}", "")) for name in ("total", "used"))
        gpus.append(Gpu(gpu.findtext("product_name", "unknown"), *memory))
    return GpuDriver(log.findtext("driver_version", ""), log.findtext("cuda_version", ""), tuple(gpus))


def _bytes(text: str) -> int | None:
    """Return the number of bytes for a string such as `143771 MiB`; None for `N/A`."""
    number, _, unit = text.partition(" ")
    return int(number) * 2**20 if number.isdigit() and unit == "MiB" else None
