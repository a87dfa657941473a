"""Root of a run's config: the sections that rl-launch reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, TypeVar, cast

from pydantic import Field

from rl_core import run_config
from rl_core.config import Config, EnvVars, PathText, WhenChanged
from rl_core.model_config import GeneratingModelConfig
from rl_launch.run_session.config import (
    CallbackConfig,
    CheckpointingConfig,
    GuardrailConfig,
    LoggerConfig,
    ProfilingConfig,
)

POLICY: Final = "policy"
"""Role and config section of the model whose weights are published and exported."""

EVAL: Final = "eval"
"""Config section of the tasks that a run scores as it trains."""

DRAFTER: Final = "drafter"
"""Role and config section of a draft model that trains with the policy and whose weights are published with its."""


DRAFT_HEAD: Final = "draft_head"
"""Section of the policy with a draft head that trains in its processes, and the name of that part of them. Its role is
of a draft model, which it excludes."""


class ClusterConfig(Config):
    """Nodes, devices, worker environments and startup timeouts."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    num_nodes: int = Field(default=1, gt=0)
    """Number of machines. More than one machine needs a Ray cluster, whose address is in RAY_ADDRESS, unless `device`
    is `rehearsal`."""
    gpus_per_node: int = Field(default=1, gt=0)
    """Number of GPUs to use on each machine."""
    device: Literal["auto", "cuda", "cpu", "rehearsal"] = "auto"
    """Device of the models. `auto` is CUDA if there are GPUs, otherwise the CPU. `rehearsal` simulates `num_nodes`
    nodes with `gpus_per_node` GPUs each on the CPU of this machine: everything except the kernels runs as on a GPU
    cluster, so use a tiny model."""
    cpu_ranks_per_node: int = Field(default=1, gt=0)
    """Number of ranks on each machine if the device is the CPU. Each computes on its part of the cores."""
    worker_envs: Literal["auto", "shared", "isolated"] = "auto"
    """Python environments of the workers: the driver's environment (`shared`), separate environments that are built for
    them (`isolated`), or the driver's environment if it has all required packages and separate ones otherwise (`auto`).
    """
    autoscaling: bool = False
    """True if the cluster adds nodes on request. A run then waits for missing devices."""
    placement_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout in seconds for devices that are in use by others or that an autoscaling cluster adds."""
    replacement_timeout_s: float = Field(default=300.0, ge=0)
    """Timeout in seconds for a new node after a node is lost, if the remaining devices are not sufficient."""
    process_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout in seconds for the first response of a process or node."""
    worker_envs_timeout_s: float = Field(default=10800.0, gt=0)
    """Timeout in seconds for building worker environments on the nodes other than the driver's node. To compile
    Transformer Engine takes an hour and more."""
    fork_server_s: float | None = Field(default=None, ge=0)
    """Time in seconds for which a Python interpreter with an imported engine is kept. It forks the next worker in a
    fraction of the import time, and serves the next check of a config for at most 120 seconds. With 0 every process
    imports the engine itself. The default is 600 on the CPU and 0 on GPUs, where it is not tested yet."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Timeout in seconds for loading a model. Large models read hundreds of gigabytes."""
    env_vars: EnvVars = {}
    """Environment variables of all workers on all nodes. Workers also inherit the driver's variables that begin with
    `NCCL_`, `GLOO_`, `UCX_`, `FI_`, `HF_`, `TRANSFORMERS_`, `TOKENIZERS_`, `TORCH_`, `PYTORCH_`, `TORCHINDUCTOR_`,
    `TORCHDYNAMO_`, `TRITON_`, `NVTE_`, `VLLM_`, `OMP_`, `GOMP_`, `MKL_`, `KMP_`, `CUDA_` or `MALLOC_`, except CUDA
    paths, thread counts and secrets (`HF_TOKEN`), which must be set here: `HF_TOKEN: ${oc.env:HF_TOKEN}`. Values that
    are set here take precedence."""


class TinkerConfig(Config):
    """Server of training steps (`rl serve tinker`); other commands do not read it."""

    host: str = "127.0.0.1"
    """Address to listen at. Addresses other than the loopback address need `keys_file`."""
    port: int = Field(default=8300, ge=0, le=65535)
    """Port to listen at; 0 for a free one."""
    base_model: str | None = None
    """Name of the base model for clients. The default is `policy.model_name`. Programs that look up a chat template or
    a tokenizer by the name of the model need its name on the Hugging Face hub if `policy.model_name` is a folder."""
    keys_file: PathText | None = None
    """YAML or JSON file of the tenants: a mapping from names to `sha256`, the SHA-256 of the tenant's key in
    hexadecimal, and the quotas `models`, `steps`, `tokens` and `storage_gb`, all optional. Without it there is a single
    tenant, who may use any key, and only on the loopback address."""
    tls_cert: PathText | None = None
    """Certificate chain in PEM format; with `tls_key`, the server speaks HTTPS."""
    tls_key: PathText | None = None
    """Private key of the certificate in PEM format."""
    queue_dir: PathText | None = None
    """Folder of the queue, the saved models and the checkpoints. The default is `tinker` in the run directory."""
    max_models: int = Field(default=64, gt=0)
    """Maximum number of models of open sessions, of all tenants. Models that are not in use are on the disk."""
    save_every: int = Field(default=10, gt=0)
    """Number of optimizer steps of a model between two saves. After a failure the requests since the last save are
    computed again."""
    idle_adapter_s: float = Field(default=600.0, gt=0)
    """Seconds without a heartbeat of its session after which a model moves to the disk. Its next request brings it
    back."""
    max_samplers: int = Field(default=8, gt=0)
    """Number of samplers of a model without a name whose weights are kept: the ones used last. Samplers that were saved
    under a name are kept until they are deleted."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Alpha of all adapters: the product of an adapter is multiplied by this number and divided by its rank."""
    refuse_unembed: bool = False
    """True to refuse models with `train_unembed=True`, the client's default. Otherwise they are accepted with one line
    in the log: adapters of the unembedding layer are not trained here."""
    max_body_mb: int = Field(default=64, gt=0)
    """Maximum number of megabytes of a request, decompressed."""
    max_queued: int = Field(default=4096, gt=0)
    """Maximum number of waiting requests of a tenant; more are answered with 429 and sent again by the client."""
    max_queued_mb: int = Field(default=1024, gt=0)
    """Maximum number of megabytes of the waiting requests of a tenant."""
    max_sampling: int = Field(default=256, gt=0)
    """Maximum number of completions that the engines compute at a time, for all tenants."""


class EnvironmentsConfig(Config):
    """Settings of the environments that score completions, by name."""


class RootConfig(Config):
    """Keys that every config has, whatever its algorithm."""

    algorithm: Annotated[str, WhenChanged.NEW_RUN]
    """Name of the algorithm, such as `grpo` (`rl recipes` lists the recipes with their algorithms), or `file.py:NAME`
    for an algorithm in your own file."""
    run_dir: Annotated[PathText | None, WhenChanged.RESUME] = None
    """Folder of the run. If it contains a run, that run is resumed. The default is a new folder under `runs`."""
    callbacks: Annotated[list[str | CallbackConfig], WhenChanged.RESUME] = []
    """Your callback classes, which training calls at its start and end and after steps, evaluations and saves:
    `file.py:Class`, or `{type: file.py:Class, settings: {...}}`."""
    guardrails: Annotated[dict[str, GuardrailConfig], WhenChanged.RESUME] = {}
    """Rules over the metrics of the steps, by a name of your choice, and the actions of the run if they are broken."""


class RunConfig(run_config.RunConfig, Protocol):
    """A resolved config: `RootConfig` with the sections that every config has. The sections of the algorithm are not
    part of it."""

    algorithm: str
    """Name of the algorithm."""
    run_dir: str | None
    """Folder of the run; None for a new one."""
    callbacks: Sequence[str | CallbackConfig]
    """Callback classes of the user."""
    guardrails: Mapping[str, GuardrailConfig]
    """Rules over the metrics of steps."""
    policy: GeneratingModelConfig
    """The trained model. It has a section `generation` only if the algorithm generates."""
    cluster: ClusterConfig
    """Nodes, devices and time limits."""
    checkpointing: CheckpointingConfig
    """When to save."""
    logger: LoggerConfig
    """Destinations of metrics."""
    profiling: ProfilingConfig
    """Profiles of workers, and traces."""
    env: Config
    """Settings of environments, by name, if the algorithm generates."""


C = TypeVar("C")


def section_of(config: object, key: str) -> Any:
    """Return the section of a resolved config at a dotted key."""
    return attrgetter(key)(config)


def leaf_of(config: object, key: str) -> Any:
    """Return the value at a dotted key, also in a section of plain values.

    Raises:
        AttributeError, KeyError, TypeError: If there is none.
    """
    found: Any = config
    for name in key.split("."):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    return found


def max_age(config: RunConfig) -> tuple[str, int] | None:
    """Return the dotted key of the maximum age of rollouts with its value, if rollouts may be older than the weights
    that train on them, or might be with a larger value; None otherwise."""
    for name, section in vars(config).items():
        settings = getattr(section, "async_grpo", None)
        if settings is not None and (settings.enabled or section.max_staleness > 0):
            return f"{name}.async_grpo.max_trajectory_age_steps", settings.max_trajectory_age_steps
    return None


def with_section(config: C, key: str, section: object) -> C:
    """Return the config with the section at a dotted key replaced."""
    head, _, rest = key.partition(".")
    changed = with_section(getattr(config, head), rest, section) if rest else section
    return with_values(config, {head: changed})


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """Return the config, or section, with the values of some keys replaced."""
    return cast(C, cast(Config, config).model_copy(update=dict(values)))
