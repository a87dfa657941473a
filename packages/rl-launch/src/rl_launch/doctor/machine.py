"""What the checks may ask of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl_launch.worker_envs import Availability, Mode, WorkerEnvSpec


@dataclass(frozen=True)
class Tool:
    """A program that is there.

    Args:
        path: of its executable.
        version: as it says.
    """

    path: str
    version: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver sees it.

    Args:
        name: of the product.
        memory_bytes: of the device; None where the driver does not tell.
        used_bytes: taken by whoever runs on it; None likewise.
    """

    name: str
    memory_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True)
class GpuDriver:
    """NVIDIA's driver.

    Args:
        version: of the driver.
        cuda: newest CUDA version it runs, `13.0`.
        gpus: every GPU of the machine.
    """

    version: str
    cuda: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True)
class Space:
    """Room in a folder, or where it would be made.

    Args:
        folder: that was asked about.
        total_bytes, free_bytes: of its file system; free for this user.
        is_writable: whether this user may write there.
    """

    folder: Path
    total_bytes: int
    free_bytes: int
    is_writable: bool


class Machine(Protocol):
    """A machine: reading a property looks, and may raise whatever the machine raises."""

    @property
    def python(self) -> str:
        """Version of the interpreter."""

    @property
    def supported_python(self) -> str:
        """Versions that rl-launch runs on, as its metadata says: `>=3.11,<3.14`."""

    @property
    def unmet(self) -> Sequence[str]:
        """What rl-launch asks for and does not find in its own environment, in words."""

    @property
    def ray(self) -> str | None:
        """Version of ray; None where it is not installed."""

    @property
    def ray_address(self) -> str:
        """The cluster that RAY_ADDRESS names; empty where it names none."""

    def answers(self, address: str) -> bool:
        """Whether something listens at `host:port`."""

    @property
    def ray_processes(self) -> Sequence[int]:
        """Ids of processes in which a Ray cluster is kept on this machine, whoever started it."""

    @property
    def ray_folder(self) -> Path:
        """Where Ray puts its sockets, logs and spilled objects."""

    @property
    def uv(self) -> Tool | None:
        """What builds environments; None where it is not there."""

    @property
    def num_gpus(self) -> int:
        """GPUs that this process may use."""

    @property
    def gpu_driver(self) -> GpuDriver | None:
        """None where there is no driver to ask."""

    def availability(self, specs: Iterable[WorkerEnvSpec], mode: Mode) -> Mapping[WorkerEnvSpec, Availability]:
        """Where each environment would come from."""

    @property
    def shared_memory(self) -> Space | None:
        """/dev/shm; None where there is none."""

    def space(self, folder: Path) -> Space:
        """Room in a folder."""

    @property
    def home(self) -> Path:
        """RL_HOME, or where its contents go where that is unset."""

    @property
    def uv_cache(self) -> Path | None:
        """uv's cache folder; None where there is no uv."""

    def open_ports(self, count: int) -> None:
        """Listen on so many free loopback ports at one time, and connect to one; raises `OSError` where that fails."""

    @property
    def sandbox(self) -> Tool | None:
        """bubblewrap, where it is there."""

    def sandbox_problem(self) -> str:
        """What bubblewrap says of starting a program in namespaces of its own; empty where it does."""

    @property
    def open_files(self) -> tuple[int, int]:
        """How many files a process may open, and how many it may raise that to."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the machine, or of the container where that is less."""

    @property
    def available_bytes(self) -> int:
        """Memory that is not in use."""

    @property
    def cores(self) -> float:
        """Cores that this process may use, a container's share in fractions."""
