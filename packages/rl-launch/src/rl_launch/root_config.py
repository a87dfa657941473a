"""The root of a run's config, as far as rl-launch reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, cast

from pydantic import Field

from rl_core import run_config
from rl_core.config import Config, EnvVars, PathText, WhenChanged
from rl_core.model_config import GeneratingModelConfig
from rl_launch.session.config import CallbackConfig, CheckpointingConfig, LoggerConfig

POLICY = "policy"
"""Role of the model whose weights are published and exported, and its config section."""


class ClusterConfig(Config):
    """Nodes, devices, environments of workers, and time limits of the start."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    num_nodes: int = Field(default=1, gt=0)
    """Number of machines; more than one need a Ray cluster, named by RAY_ADDRESS."""
    gpus_per_node: int = Field(default=1, gt=0)
    """GPUs to use on each machine."""
    device: Literal["auto", "cuda", "cpu", "rehearsal"] = "auto"
    """Device of the models; `auto` is CUDA if there are GPUs. `rehearsal` runs `num_nodes` nodes of `gpus_per_node`
    GPUs on this machine's CPU: everything but the kernels is as on a cluster of GPUs, so use a tiny model."""
    cpu_ranks_per_node: int = Field(default=1, gt=0)
    """Ranks on each machine if the device is the CPU."""
    worker_envs: Literal["auto", "shared", "isolated"] = "auto"
    """Environments of the workers: the driver's (`shared`), ones that are built for them (`isolated`), or the driver's
    if it has all they need and built ones otherwise (`auto`)."""
    autoscaling: bool = False
    """Whether the cluster adds nodes on request; a run then waits for devices that it lacks."""
    placement_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for devices that others use, or that an autoscaling cluster adds."""
    replacement_timeout_s: float = Field(default=300.0, ge=0)
    """After the loss of a node: longest wait for another one if the remaining devices do not suffice."""
    process_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first answer of a process, or of a node."""
    worker_envs_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time to build the environments of workers on nodes other than the driver's."""
    fork_server_s: float | None = Field(default=None, ge=0)
    """How long a Python interpreter that has imported an engine stays for the next worker, which it forks in a fraction
    of the time, and for the next check of a config, at most 120; 0: every process imports by itself. Unset: 600 on CPU;
    on GPUs 0, until it has been tried on them."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time to load a model: large ones read hundreds of gigabytes."""
    env_vars: EnvVars = {}
    """Environment variables of all workers on all nodes. Workers also get the driver's that begin with `NCCL_`,
    `GLOO_`, `UCX_`, `FI_`, `HF_`, `TRANSFORMERS_`, `TOKENIZERS_`, `TORCH_`, `PYTORCH_`, `TORCHINDUCTOR_`,
    `TORCHDYNAMO_`, `TRITON_`, `NVTE_`, `VLLM_`, `OMP_`, `GOMP_`, `MKL_`, `KMP_`, `CUDA_` or `MALLOC_`, except paths of
    CUDA, numbers of threads and secrets (`HF_TOKEN`), which must be named here: `HF_TOKEN: ${oc.env:HF_TOKEN}`.
    Values that are set here win."""


class EnvironmentsConfig(Config):
    """Settings of environments, which score completions, by name."""


class RootConfig(Config):
    algorithm: Annotated[str, WhenChanged.NEW_RUN]
    """Name of the algorithm, such as `grpo` (`rl recipes` lists recipes with theirs), or `file.py:NAME` of one in a
    file of yours."""
    run_dir: Annotated[PathText | None, WhenChanged.RESUME] = None
    """Folder of the run, resumed if it holds one; if unset, a new folder under `runs`."""
    callbacks: Annotated[list[str | CallbackConfig], WhenChanged.RESUME] = []
    """Your classes that training calls at its start and end, after steps, evaluations and saves: `file.py:Class`,
    or `{type: file.py:Class, settings: {...}}`."""


class RunConfig(run_config.RunConfig, Protocol):
    """A resolved config: `RootConfig` with the sections that every config has. Those of its algorithm are the
    algorithm's own business."""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        ...

    @property
    def run_dir(self) -> str | None:
        """Folder of the run; None for a new one."""
        ...

    @property
    def callbacks(self) -> Sequence[str | CallbackConfig]:
        """Classes of the user's that training calls."""
        ...

    @property
    def policy(self) -> GeneratingModelConfig:
        """The model that trains; it has a section `generation` only if the algorithm generates."""
        ...

    @property
    def cluster(self) -> ClusterConfig:
        """Nodes, devices and time limits."""
        ...

    @property
    def checkpointing(self) -> CheckpointingConfig:
        """When to save."""
        ...

    @property
    def logger(self) -> LoggerConfig:
        """Where metrics go."""
        ...

    @property
    def env(self) -> Config:
        """Settings of environments by name, if the algorithm generates."""
        ...


C = TypeVar("C")


def section_of(config: object, key: str) -> Any:
    """Return the section of a resolved config at a dotted key."""
    return attrgetter(key)(config)


def with_section(config: C, key: str, section: object) -> C:
    """Return the config with another section at a dotted key."""
    head, _, rest = key.partition(".")
    changed = with_section(getattr(config, head), rest, section) if rest else section
    return with_values(config, {head: changed})


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """Return the config, or section, with other values of some of its keys."""
    return cast(C, cast(Config, config).model_copy(update=dict(values)))
