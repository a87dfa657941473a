"""Settings of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from pydantic import Field, model_validator

from rl_core.config import Config, PathText, Problem, ProblemError
from rl_core.rollouts.environment import UnusableAnswer
from rl_envs.sandbox.program import Isolation, Limits


def row_image(info: Mapping[str, Any], config: SandboxConfig) -> str:
    """Return the image that a row brings for its programs; empty if it brings none.

    Raises:
        UnusableAnswer: If it is not the name of an image, or the sandbox has no images.
    """
    image = info.get("image") or ""
    if not isinstance(image, str) or image.startswith("-"):
        raise UnusableAnswer(f"`image` must be the name of an image, got {image!r:.80}")
    if image and config.service is None:
        raise UnusableAnswer(
            f"the row has the image {image}, which this sandbox cannot use; set sandbox.service to docker or podman"
        )
    return image


class SandboxConfig(Config):
    """Sandbox of programs, and its limits."""

    isolation: Isolation = "namespaces"
    """Level of isolation, which a machine must support or the environment does not start. `namespaces`: each program
    has its own root, network and processes, and system calls are filtered. `landlock`, for machines that refuse
    namespaces, such as many containers: rules deny access to the machine's files, network and processes, and programs
    cannot start processes. `limits` contains accidents only: programs have the files and the network of this user."""
    url: str | None = None
    """Address of a sandbox server (`POST /run_code`, as in SandboxFusion). Programs run there instead of on this
    machine."""
    key_env: str = ""
    """Environment variable with the key of the server at `url`, which is sent as a bearer token; empty for none."""
    service: PathText | None = None
    """Service that runs each program on a machine of its own: `docker` or `podman` for containers on this machine,
    `e2b` or `modal`, or a class with the methods of `rl_envs.SandboxService`, as `file.py:Class` or
    `package.module:Class`. Services read their keys from environment variables."""
    image: str = ""
    """Image of the machines of `service`: an image for containers and for `modal`, a template for `e2b`. A row may have
    its own as `image`. Empty for the default of the service."""
    cpu_s: float = Field(default=Limits.cpu_s, gt=0)
    """CPU time limit of a program in seconds, rounded up to whole seconds."""
    wall_s: float = Field(default=Limits.wall_s, gt=0)
    """Time limit of a program in seconds; it is killed when it runs longer."""
    memory_mib: int = Field(default=Limits.memory_mib, ge=64)
    """Memory limit in MiB of a program with all its processes."""
    scratch_mib: int = Field(default=Limits.scratch_mib, ge=1)
    """Size in MiB of a program's scratch folder, the only files that it can write."""
    processes: int = Field(default=Limits.processes, ge=1, le=4096)
    """Maximum number of processes and threads of a program."""
    open_files: int = Field(default=Limits.open_files, ge=16, le=2**16)
    """Maximum number of descriptors of each process of a program. Node.js opens hundreds of files as it starts."""
    output_kib: int = Field(default=Limits.output_kib, ge=1, le=2**17)
    """Output limit in KiB of a program on stdout, and on stderr. The program is killed when it writes more."""
    python_path: list[PathText] = []
    """Folders with packages that programs may import in addition to Python's own library."""
    commands: list[PathText] = []
    """Folders with commands that programs may execute, such as `[/usr/bin, /bin]`, in addition to the Python that they
    run in. Needs `isolation: namespaces`. Programs can read everything in these folders."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if self.url is not None and self.service is not None:
            raise ProblemError(Problem("service", "cannot be used with url", remedy="Remove one of them"))
        if self.url is None and self.key_env:
            raise ProblemError(Problem.unused("key_env", "without url"))
        if self.service is None and self.image:
            raise ProblemError(Problem.unused("image", "without service", remedy="Set service, such as docker"))
        elsewhere = "url" if self.url is not None else "service"
        for key in ("commands", "python_path", "isolation"):
            if (self.url or self.service) and getattr(self, key) != type(self).model_fields[key].default:
                reason = f"with {elsewhere}, which decides what its programs can read, execute and reach"
                raise ProblemError(Problem.unused(key, reason))
        if self.commands and self.isolation != "namespaces":
            reason = f"cannot be contained with isolation={self.isolation}"
            remedy = "Set isolation=namespaces, or remove commands"
            raise ProblemError(Problem("commands", reason, got=self.commands, remedy=remedy))
        return self

    @property
    def limits(self) -> Limits:
        """Limits of one program."""
        names = (field.name for field in fields(Limits) if field.name in type(self).model_fields)
        return Limits(**{name: getattr(self, name) for name in names})
