"""Commands in containers, as words of bash."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_launch.submit.slurm.config import ContainerConfig, SlurmConfig
from rl_launch.submit.target import JobRequest

_CACHES = ("RL_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
"""Environment variables with the folders of downloads and worker environments."""


@dataclass(frozen=True)
class InContainer:
    """How a command is run in a container.

    Args:
        step_options: Options of srun; every command then needs a step of its own.
        command: Words before the command.
    """

    step_options: Sequence[str] = ()
    command: Sequence[str] = ()


def in_container(request: JobRequest[SlurmConfig]) -> InContainer:
    """Return how the commands of a job are run in its container, if it has one."""
    container = request.settings.container
    return _RUNTIMES[container.runtime](container, _mounts(request), request)


def _without(container: ContainerConfig, mounts: Sequence[str], request: JobRequest[SlurmConfig]) -> InContainer:
    return InContainer()


def _by_pyxis(container: ContainerConfig, mounts: Sequence[str], request: JobRequest[SlurmConfig]) -> InContainer:
    image = shlex.quote(str(container.image))
    # without this option a variable of the image would be kept instead
    names = ",".join(request.settings.env_vars)
    chosen = [f"--container-env={names}"] if names else []
    options = map(shlex.quote, container.options)
    return InContainer(
        step_options=(f"--container-image={image}", f'--container-mounts="{",".join(mounts)}"', *chosen, *options)
    )


def _by_apptainer(container: ContainerConfig, mounts: Sequence[str], request: JobRequest[SlurmConfig]) -> InContainer:
    gpus = ["--nv"] if request.device.has_gpus and not request.device.is_logical else []
    bind = f'--bind "{",".join(mounts)}"'
    options = map(shlex.quote, container.options)
    return InContainer(command=("apptainer exec", *gpus, bind, *options, shlex.quote(str(container.image))))


_RUNTIMES: Mapping[str, Callable[[ContainerConfig, Sequence[str], JobRequest[SlurmConfig]], InContainer]] = {
    "none": _without,
    "pyxis": _by_pyxis,
    "apptainer": _by_apptainer,
}


def outside_mounts(request: JobRequest[SlurmConfig]) -> dict[str, str]:
    """Return the environment variables of a job that name folders of caches which no mount of its container has; their
    values by name."""
    container = request.settings.container
    if container.image is None:
        return {}
    mounted = [request.run_dir, Path.home(), *(Path(mount.split(":")[:2][-1]) for mount in container.mounts)]
    return {
        name: value
        for name, value in request.settings.env_vars.items()
        if name in _CACHES and not any(map(Path(value).is_relative_to, mounted))
    }


def _mounts(request: JobRequest[SlurmConfig]) -> list[str]:
    """Return the folders of the run, the recipe, the job and the user, which the container sees, for bash to read
    between double quotes."""
    recipe = Path(request.train[2])
    own = [request.run_dir, *([recipe.parent] if recipe.is_absolute() else [])]
    paths = [f"{path}:{path}" for path in dict.fromkeys(map(str, own))]
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in request.settings.container.mounts]
    return [*map(_escaped, paths), "$scratch:$scratch", *map(_escaped, given)]


def _escaped(text: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", text)
