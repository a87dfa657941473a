"""Settings of Slurm jobs: those that a site sets once, in a profile, and those that differ from run to run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rl_core.config import Config, Problem, ProblemError, is_changed

_TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_OPTION = re.compile(r"-[A-Za-z]|--[a-z][a-z-]*")
_MAX_LOCAL_FOLDER = 18
"""The job's folder is below it, and Ray's sockets below that, whose paths the operating system limits."""

OWN_OPTIONS = {
    **dict.fromkeys(("-J", "--job-name", "-o", "--output", "-e", "--error", "--open-mode"), ""),
    **dict.fromkeys(("-n", "--ntasks", "--ntasks-per-node", "-k", "--no-kill", "--requeue"), ""),
    **dict.fromkeys(("-N", "--nodes"), "cluster.num_nodes"),
    **dict.fromkeys(("-a", "--array", "-d", "--dependency", "--no-requeue"), "slurm.continuation"),
    **dict.fromkeys(("-G", "--gpus", "--gpus-per-node"), "cluster.gpus_per_node and slurm.gpu_option"),
    **dict.fromkeys(("-p", "--partition"), "slurm.partition"),
    **dict.fromkeys(("-A", "--account"), "slurm.account"),
    **dict.fromkeys(("-q", "--qos"), "slurm.qos"),
    **dict.fromkeys(("-t", "--time"), "slurm.time_limit"),
    "--exclusive": "slurm.exclusive",
    "--signal": "slurm.save_margin_s",
}
"""Options of sbatch that the script sets itself, and the key that changes each; empty if nothing does."""

OWN_RAY_OPTIONS = {
    **dict.fromkeys(("--head", "--address", "--block", "--temp-dir", "--num-cpus", "--include-dashboard"), ""),
    "--num-gpus": "cluster.gpus_per_node",
    **dict.fromkeys(("--port", "--node-manager-port", "--object-manager-port"), "slurm.first_port"),
    **dict.fromkeys(("--min-worker-port", "--max-worker-port", "--metrics-export-port"), "slurm.first_port"),
}
"""The same of `ray start`."""


class ContainerConfig(Config):
    """Container of Ray and the driver on every node."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    """Program that starts the container: the plugin pyxis of Slurm (with enroot), or apptainer. With `none`, Ray and
    `rl` come from the environment that `rl submit` is called in, which the nodes must share."""
    image: str | None = None
    """Image, as the runtime takes it, such as `/shared/rl.sqsh` or `/shared/rl.sif`. It needs bash, `rl` and Ray."""
    mounts: list[str] = []
    """Folders of the node that the container sees, as `HOST`, `HOST:CONTAINER` or `HOST:CONTAINER:OPTIONS`. The run
    directory, and the folder of a recipe that is a file, are mounted under their own paths."""
    options: list[str] = []
    """Further options of the runtime, such as `--no-container-mount-home` or `--cleanenv`."""

    @model_validator(mode="after")
    def _is_whole(self) -> ContainerConfig:
        if self.runtime == "none":
            unused = [name for name in ("image", "mounts", "options") if is_changed(self, name)]
            if unused:
                remedy = "Set container.runtime to pyxis or apptainer"
                raise ProblemError(*(Problem.unused(name, "without a runtime", remedy=remedy) for name in unused))
        elif not self.image:
            raise ProblemError(Problem("image", f"must be set with runtime: {self.runtime}"))
        return self

    @field_validator("mounts")
    @classmethod
    def _are_absolute(cls, mounts: list[str]) -> list[str]:
        relative = [mount for mount in mounts if not mount.startswith("/")]
        if relative:
            raise ProblemError(Problem("", "must be an absolute path", got=relative[0]))
        return mounts


class SlurmConfig(Config):
    """Settings of Slurm jobs."""

    also_called: ClassVar[dict[str, str]] = {"time": "time_limit", "signal": "save_margin_s", "env": "env_vars"}

    partition: str | None = None
    """Partition, or several separated by commas; the site's default if not set."""
    account: str | None = None
    """Account that the job is charged to."""
    qos: str | None = None
    """Quality of service."""
    time_limit: str | None = None
    """Time limit of one attempt, as Slurm takes it: minutes, `HH:MM:SS` or `D-HH:MM:SS`; the partition's limit if not
    set. A run that needs longer is continued in further attempts."""
    save_margin_s: int = Field(default=300, ge=30)
    """Time in seconds before the end of the job when the run has to save and end after its step. The run ends
    earlier if another step and its checkpoint would not fit before that."""
    exclusive: bool = True
    """Use whole nodes, with all of their cores and memory."""
    cpus_per_node: int | None = Field(default=None, gt=0)
    """Cores on each node, without `exclusive`."""
    memory_per_node: str | None = None
    """Memory on each node, such as `200G`, without `exclusive`."""
    gpu_option: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Option of sbatch that asks for the GPUs: `gres` writes `--gres=gpu:8`, for sites that do not take
    `--gpus-per-node`. `--gres` of other resources in `sbatch_options` is added to it."""
    gpu_type: str | None = None
    """Type of the GPUs, if the site has several, such as `h100`."""
    continuation: Literal["requeue", "array", "dependency"] = "requeue"
    """How the run is continued after an attempt that ended before the last step. `requeue` returns the same job to the
    queue. `array` and `dependency` submit `max_jobs` jobs at once, which run one after another, for sites that do not
    allow a requeue; the rest is cancelled once the run is finished or has failed."""
    max_jobs: int = Field(default=8, gt=1)
    """Number of jobs with `continuation: array` or `dependency`."""
    preflight: bool = False
    """Examine the nodes before the run starts, with `rl doctor --cluster`. The job fails if the run would, and its log
    lists the nodes."""
    max_attempts_without_checkpoint: int = Field(default=3, gt=0)
    """Maximum number of attempts in a row without a new checkpoint."""
    local_folder: str = "/tmp"
    """Folder on the disk of each node. The job makes its own folder in it, for Ray and temporary files."""
    first_port: int = Field(default=20000, ge=1024, le=55000)
    """First of 10,000 ports. A job takes 500 of them for Ray. They should be outside the range that Linux gives
    to clients (/proc/sys/net/ipv4/ip_local_port_range)."""
    env_vars: dict[str, str] = {}
    """Environment variables of the job, in addition to the variables of the shell that submits it. A secret is given as
    `HF_TOKEN: ${oc.env:HF_TOKEN}`, and is then taken from that shell (`--export=ALL`) and not written into the script.
    With pyxis they replace variables of the image."""
    setup: str = ""
    """Lines of bash that prepare the environment, such as `module load gcc`. They run on the first node, after
    `env_vars` are set; the variables that they export reach the others."""
    sbatch_options: list[str] = []
    """Further options of sbatch, such as `--mail-type=FAIL` or `--constraint=nvlink`."""
    ray_options: list[str] = []
    """Further options of `ray start` on every node, such as `--object-store-memory=50000000000`."""
    container: ContainerConfig = ContainerConfig()

    @field_validator("time_limit")
    @classmethod
    def _is_time(cls, value: str | None) -> str | None:
        if value is not None and not _TIME.fullmatch(value):
            raise ProblemError(Problem("", got=value, allowed="minutes, HH:MM:SS or D-HH:MM:SS"))
        return value

    @field_validator("local_folder")
    @classmethod
    def _is_short(cls, value: str) -> str:
        if not value.startswith("/") or len(value) > _MAX_LOCAL_FOLDER:
            allowed = f"an absolute path of up to {_MAX_LOCAL_FOLDER} characters"
            raise ProblemError(Problem("", got=value, allowed=allowed))
        return value.rstrip("/")

    @field_validator("env_vars")
    @classmethod
    def _are_names(cls, variables: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in variables if not _VARIABLE.fullmatch(name)]
        if wrong:
            raise ProblemError(*(Problem(name, "is not a valid name for an environment variable") for name in wrong))
        return variables

    @field_validator("sbatch_options")
    @classmethod
    def _are_other_options_of_sbatch(cls, options: list[str]) -> list[str]:
        return _other_options(options, OWN_OPTIONS, "an option of sbatch, such as --mail-type=FAIL")

    @field_validator("ray_options")
    @classmethod
    def _are_other_options_of_ray(cls, options: list[str]) -> list[str]:
        allowed = "an option of ray start, such as --object-store-memory=8000000000"
        return _other_options(options, OWN_RAY_OPTIONS, allowed)

    @model_validator(mode="after")
    def _fits(self) -> SlurmConfig:
        problems = []
        if self.exclusive:
            remedy = "Remove it, or set exclusive: false"
            shares = [name for name in ("cpus_per_node", "memory_per_node") if is_changed(self, name)]
            problems += [Problem.unused(name, "with exclusive: true", remedy=remedy) for name in shares]
        if self.continuation == "requeue" and is_changed(self, "max_jobs"):
            problems.append(Problem.unused("max_jobs", "with continuation: requeue"))
        if problems:
            raise ProblemError(*problems)
        return self


def _other_options(options: list[str], own: Mapping[str, str], allowed: str) -> list[str]:
    """Return the options of a program if the script sets none of them itself.

    Args:
        options: The options, each in one string with its value.
        own: Options that the script sets, and the key that changes each.
        allowed: Description of the allowed options, for the message.
    """
    problems = []
    for option in options:
        found = _OPTION.match(option)
        name = found[0] if found else ""
        if not name or "\n" in option:
            problems.append(Problem("", got=option, allowed=allowed))
        elif name in own:
            remedy = f"Use {own[name]}" if own[name] else "Remove it"
            problems.append(Problem("", "is set by the script itself", got=option, remedy=remedy))
    if problems:
        raise ProblemError(*problems)
    return options
