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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from rl_core.environments.instance import EnvironmentInstance, machine_check_of
from rl_core.plugins import KINDS, load_problem, names
from rl_launch.cluster.local_gpus import local_gpus
from rl_launch.cluster.process_limit import ProcessLimit, process_limit
from rl_launch.cluster.ray_address import is_answered
from rl_launch.cluster.ray_folder import ray_folder
from rl_launch.cluster.token_file import token_problem
from rl_launch.doctor.gpus import GpuDriver, ask_driver
from rl_launch.worker_envs import Availability, Mode, Wanted, WorkerEnvSpec, availability_of, default_root, missing
from rl_launch.worker_envs.driver import project_distributions
from rl_launch.worker_envs.node_build import EnvBuildError, clean_environment, find_uv

_TIMEOUT_S = 5.0
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Tool:
    """An installed program.

    Args:
        path: Path of its executable.
        version: As the program prints it.
    """

    path: str
    version: str


@dataclass(frozen=True)
class Space:
    """Room in a folder, or in the one that it would be made in.

    Args:
        folder: The folder.
        total_bytes, free_bytes: Size of its file system, and free space for this user.
        is_writable: True if this user may write there.
    """

    folder: Path
    total_bytes: int
    free_bytes: int
    is_writable: bool


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
        """The cluster that RAY_ADDRESS names; empty if it names none."""
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
        """Folder in which Ray puts its sockets, logs and spilled objects."""
        return ray_folder()

    @property
    def token_problem(self) -> tuple[str, str] | None:
        """Why others can take the token of this user's Ray clusters, and the remedy; None if they cannot."""
        return token_problem()

    @cached_property
    def uv(self) -> Tool | None:
        """The program that builds environments; None if it is not installed."""
        try:
            path = find_uv()
        except (EnvBuildError, FileNotFoundError):
            return None
        return Tool(path, _said(path, "--version").removeprefix("uv ").partition(" ")[0])

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
        """Return whether nvcc is on the path, or in the folder of a CUDA toolkit."""
        homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
        return any(shutil.which("nvcc", path=home and f"{home}/bin") for home in (None, *filter(None, homes)))

    def availability(self, specs: Iterable[WorkerEnvSpec], mode: Mode) -> Mapping[WorkerEnvSpec, Availability]:
        """Availability of each environment."""
        asked = (tuple(specs), mode)
        if asked not in self._availability:
            self._availability[asked] = availability_of(*asked)
        return self._availability[asked]

    @property
    def shared_memory(self) -> Space | None:
        """/dev/shm; None if there is none."""
        folder = Path("/dev/shm")
        return self.space(folder) if folder.is_dir() else None

    def space(self, folder: Path) -> Space:
        """Room in a folder."""
        folder = folder.absolute()
        there = next(each for each in (folder, *folder.parents) if each.exists())
        system = os.statvfs(there)
        return Space(
            folder,
            system.f_blocks * system.f_frsize,
            system.f_bavail * system.f_frsize,
            there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        )

    @property
    def home(self) -> Path:
        """RL_HOME, or the folder that is used if it is not set."""
        return default_root().parent

    @property
    def uv_cache(self) -> Path | None:
        """uv's cache folder; None if there is no uv."""
        return Path(_said(self.uv.path, "cache", "dir")) if self.uv else None

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
        """Return the maximum number of files that a process can open, and the limit to which it can increase that."""
        soft, hard = (
            sys.maxsize if limit == resource.RLIM_INFINITY else limit
            for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
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


def _said(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=_TIMEOUT_S, check=True
    )
    return done.stdout.strip()


def _control(name: str) -> str:
    """A limit of the control group, of version 2 or 1, as written in its file; empty if there is none."""
    path = _CONTROL_GROUP / name
    return path.read_text().strip() if path.is_file() else ""
