"""Machines that nobody has: facts instead of a look at this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl_core.devices import CPU
from rl_launch.cluster.process_limit import ProcessLimit
from rl_launch.doctor.machine import Gpu, GpuDriver, InstalledTool
from rl_launch.doctor.needs import Needs
from rl_launch.doctor.room import Room
from rl_launch.worker_envs.provision import Availability, TorchBuild
from rl_launch.worker_envs.spec import Wanted, WorkerEnvSpec

GIB = 2**30
TRAINER = WorkerEnvSpec((Wanted("trainer", ("worker",)),), ())
ENGINE = WorkerEnvSpec((Wanted("engine", ("cpu",)),), ())
HERE = Availability("driver", {"torch": "2.13.0"}, TorchBuild("2.13.0", "13.0"))
TO_BUILD = Availability("to build", {"torch": "2.13.0"}, TorchBuild("2.13.0", "13.0"))
TO_COMPILE = replace(TO_BUILD, compiled=("transformer-engine-torch",))
NO_UV = Availability("unavailable", problem="uv is not installed on this node: pip install uv")
H200 = Gpu("NVIDIA H200", 140 * GIB, 0)


def space(free_gib: float, total_gib: float = 100, *, is_writable: bool = True, folder: str = "/there") -> Room:
    return Room(str(Path(folder)), int(total_gib * GIB), int(free_gib * GIB), is_writable)


UV = InstalledTool("/bin/uv", "0.13.8")
ROOMY = space(16, 16)


def needs(**changed: object) -> Needs:
    facts = {
        "recipe": "some-recipe",
        "device": CPU,
        "num_nodes": 1,
        "ranks_per_node": 2,
        "worker_envs": "auto",
        "workers": {"policy": TRAINER, "generation": ENGINE},
        "runs": Path("runs"),
        "num_engines": 1,
    }
    return Needs(**{**facts, **changed})  # type: ignore[arg-type]


@dataclass(frozen=True)
class FakeMachine:
    """A machine that runs everything on the CPU, unless its facts are changed."""

    python: str = "3.12.4"
    supported_python: str = ">=3.11,<3.14"
    unmet: tuple[str, ...] = ()
    broken_plugins: tuple[str, ...] = ()
    ray: str | None = "2.60.0"
    ray_address: str = ""
    listening: frozenset[str] = frozenset()
    ray_processes: tuple[int, ...] = ()
    ray_folder: Path = Path("/tmp/ray")
    token_problem: tuple[str, str] | None = None
    uv: InstalledTool | None = UV
    num_gpus: int = 0
    gpu_driver: GpuDriver | None = None
    has_cuda_compiler: bool = True
    environments: Mapping[WorkerEnvSpec, Availability] = field(default_factory=lambda: {TRAINER: HERE, ENGINE: HERE})
    shared_memory: Room | None = ROOMY
    disks: Mapping[str, Room] = field(default_factory=dict)
    home: Path = Path("/home/me/.cache/rl")
    uv_cache: Path | None = Path("/home/me/.cache/uv")
    ports_error: str = ""
    environment_says: str | None = None
    process_limit: ProcessLimit | None = None
    open_files: tuple[int, int] = (1024, 2**20)
    memory_bytes: int = 32 * GIB
    available_bytes: int = 24 * GIB
    cores: float = 8

    def answers(self, address):
        return address in self.listening

    def availability(self, specs, mode):
        return {spec: self.environments[spec] for spec in specs}

    def space(self, folder):
        return self.disks.get(str(folder), space(80))

    def open_ports(self, count):
        if self.ports_error:
            raise OSError(self.ports_error)

    def environment_problem(self, environment):
        return self.environment_says
