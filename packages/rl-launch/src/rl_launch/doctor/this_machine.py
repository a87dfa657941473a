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
from functools import cached_property
from pathlib import Path

import psutil

from rl_launch.cluster.device import local_gpus
from rl_launch.cluster.ray_address import is_answered
from rl_launch.doctor.gpus import ask_driver
from rl_launch.doctor.machine import GpuDriver, Space, Tool
from rl_launch.worker_envs import Availability, Mode, Wanted, WorkerEnvSpec, availability_of, default_root, missing
from rl_launch.worker_envs.node_build import EnvBuildError, clean_environment, find_uv

_TIMEOUT_S = 5.0
_CONTROL_GROUP = Path("/sys/fs/cgroup")


class ThisMachine:
    """A `Machine`; each thing is looked at when it is asked for."""

    def __init__(self) -> None:
        self._availability: dict[tuple[tuple[WorkerEnvSpec, ...], Mode], Mapping[WorkerEnvSpec, Availability]] = {}

    @property
    def python(self) -> str:
        return platform.python_version()

    @property
    def supported_python(self) -> str:
        return str(importlib.metadata.metadata("rl-launch")["Requires-Python"])

    @property
    def unmet(self) -> Sequence[str]:
        return missing(WorkerEnvSpec((Wanted("rl-launch"),), ()))

    @property
    def ray(self) -> str | None:
        try:
            return importlib.metadata.version("ray")
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def ray_address(self) -> str:
        return os.environ.get("RAY_ADDRESS", "")

    def answers(self, address: str) -> bool:
        return is_answered(address, timeout_s=1.0)

    @property
    def ray_processes(self) -> Sequence[int]:
        return [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "gcs_server"]

    @property
    def ray_folder(self) -> Path:
        return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"

    @cached_property
    def uv(self) -> Tool | None:
        try:
            path = find_uv()
        except (EnvBuildError, FileNotFoundError):
            return None
        return Tool(path, _said(path, "--version").removeprefix("uv ").partition(" ")[0])

    @property
    def num_gpus(self) -> int:
        return local_gpus()

    @cached_property
    def gpu_driver(self) -> GpuDriver | None:
        return ask_driver()

    def availability(self, specs: Iterable[WorkerEnvSpec], mode: Mode) -> Mapping[WorkerEnvSpec, Availability]:
        asked = (tuple(specs), mode)
        if asked not in self._availability:
            self._availability[asked] = availability_of(*asked)
        return self._availability[asked]

    @property
    def shared_memory(self) -> Space | None:
        folder = Path("/dev/shm")
        return self.space(folder) if folder.is_dir() else None

    def space(self, folder: Path) -> Space:
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
        return default_root().parent

    @property
    def uv_cache(self) -> Path | None:
        return Path(_said(self.uv.path, "cache", "dir")) if self.uv else None

    def open_ports(self, count: int) -> None:
        with ExitStack() as opened:
            listening = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            opened.enter_context(socket.create_connection(listening[-1].getsockname(), timeout=_TIMEOUT_S))

    @cached_property
    def sandbox(self) -> Tool | None:
        path = shutil.which("bwrap")
        return Tool(path, _said(path, "--version").removeprefix("bubblewrap ")) if path else None

    def sandbox_problem(self) -> str:
        assert self.sandbox is not None
        command = [self.sandbox.path, "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        return (done.stderr.strip() or f"it ended with {done.returncode}") if done.returncode else ""

    @property
    def open_files(self) -> tuple[int, int]:
        soft, hard = (
            sys.maxsize if limit == resource.RLIM_INFINITY else limit
            for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        return soft, hard

    @property
    def memory_bytes(self) -> int:
        limit = _control("memory.max") or _control("memory/memory.limit_in_bytes")
        total = psutil.virtual_memory().total
        return min(total, int(limit)) if limit.isdigit() else total

    @property
    def available_bytes(self) -> int:
        return min(psutil.virtual_memory().available, self.memory_bytes)

    @property
    def cores(self) -> float:
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
    """A limit of the control group, of version 2 or 1, as its file says; empty where there is none."""
    path = _CONTROL_GROUP / name
    return path.read_text().strip() if path.is_file() else ""
