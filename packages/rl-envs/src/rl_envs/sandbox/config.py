"""Settings of a sandbox."""

from __future__ import annotations

from pydantic import Field

from rl_core.config import Config, PathText
from rl_envs.sandbox.program import Isolation, Limits


class SandboxConfig(Config):
    """Where and within which limits programs run."""

    isolation: Isolation = "namespaces"
    """The level of isolation, which a machine must offer or the environment does not start. `namespaces`: a root, a
    network and processes of its own for each program, system calls filtered. `landlock`, for machines where namespaces
    are refused, such as many containers: the machine's files, network and processes are denied by rules, and programs
    cannot start processes. `limits` contains accidents only: programs have the files and the network of this user."""
    url: str | None = None
    """Address of a sandbox server (`POST /run_code` as SandboxFusion has it); programs run there and not here."""
    cpu_s: float = Field(default=Limits.cpu_s, gt=0)
    """Most seconds of CPU of a program, rounded up to whole seconds."""
    wall_s: float = Field(default=Limits.wall_s, gt=0)
    """Most seconds until a program is killed."""
    memory_mib: int = Field(default=Limits.memory_mib, ge=64)
    """Most memory of a program with all its processes."""
    scratch_mib: int = Field(default=Limits.scratch_mib, ge=1)
    """Size of a program's scratch folder, the only files that it can write."""
    processes: int = Field(default=Limits.processes, ge=1, le=4096)
    """Most processes and threads of a program."""
    output_kib: int = Field(default=Limits.output_kib, ge=1, le=2**17)
    """Most output of a program on stdout, and on stderr; it is killed when it writes more."""
    python_path: list[PathText] = []
    """Folders with packages that programs may import besides Python's own library."""

    @property
    def limits(self) -> Limits:
        """The limits of one program."""
        return Limits(
            cpu_s=self.cpu_s,
            wall_s=self.wall_s,
            memory_mib=self.memory_mib,
            scratch_mib=self.scratch_mib,
            processes=self.processes,
            output_kib=self.output_kib,
        )
