"""Settings of Kubernetes jobs: those that a cluster sets once, in a profile, and those that differ from run to run."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rl_core.config import Config, Problem, ProblemError, is_changed

_QUANTITY = re.compile(r"\d+(\.\d+)?([kMGTP]i?|m)?")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_OF_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


class VolumeConfig(Config):
    """A claim that all pods mount."""

    claim: str
    """Name of a PersistentVolumeClaim, whose access mode is ReadWriteMany, or ReadOnlyMany with `read_only`."""
    path: str
    """Absolute path of the folder in the pods."""
    sub_path: str | None = None
    """Folder of the volume to mount; the whole volume if not set."""
    read_only: bool = False
    """Mount it without write access."""

    @field_validator("claim")
    @classmethod
    def _is_label(cls, claim: str) -> str:
        if not _CLAIM.fullmatch(claim):
            raise ProblemError(Problem("", got=claim, allowed="up to 63 lower-case letters, digits and hyphens"))
        return claim

    @field_validator("path")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not path.strip("/") or not path.startswith("/") or ".." in path.split("/"):
            raise ProblemError(Problem("", "must be an absolute path without .., and not /", got=path))
        return path.rstrip("/")


class TolerationConfig(Config):
    """A taint of nodes that pods accept."""

    key: str | None = None
    """Key of the taint; every taint if not set."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Exists` for any value, `Equal` for `value`."""
    value: str | None = None
    """Value of the taint, with `operator: Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; every effect if not set."""

    @model_validator(mode="after")
    def _is_whole(self) -> TolerationConfig:
        if self.operator == "Equal" and (self.key is None or self.value is None):
            raise ProblemError(Problem("operator", "needs a key and a value", got="Equal"))
        if self.operator == "Exists" and self.value is not None:
            raise ProblemError(Problem.unused("value", "with operator: Exists", remedy="Set operator: Equal"))
        return self


class SecretConfig(Config):
    """An environment variable whose value is in a secret of the namespace."""

    env_var: str
    """Name of the variable, such as `HF_TOKEN`."""
    name: str
    """Name of the secret."""
    key: str
    """Key in the secret."""

    @field_validator("env_var")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not _VARIABLE.fullmatch(name):
            raise ProblemError(Problem("", "is not a valid name for an environment variable", got=name))
        return name


class PodConfig(Config):
    """Size and place of a pod. Requests and limits are equal."""

    cpus: int | None = Field(default=None, gt=0)
    """Number of cores."""
    memory: str | None = None
    """Memory, such as `64Gi`, including `/dev/shm`."""
    shared_memory: str | None = None
    """Maximum size of `/dev/shm`, such as `32Gi`; if not set, the memory of the pod."""
    node_selector: dict[str, str] = {}
    """Labels that the node must have."""
    tolerations: list[TolerationConfig] = []
    """Taints that the pod accepts."""
    annotations: dict[str, str] = {}
    """Annotations of the pod, such as `k8s.v1.cni.cncf.io/networks` for further networks, or the topology that Kueue
    should keep to."""

    @field_validator("memory", "shared_memory")
    @classmethod
    def _is_quantity(cls, value: str | None) -> str | None:
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ProblemError(Problem("", got=value, allowed="a quantity of Kubernetes, such as 64Gi"))
        return value


class QueueConfig(Config):
    """The scheduler that starts all pods of a run together, or none."""

    scheduler: Literal["default", "kueue", "kai", "volcano"] = "default"
    """`kueue` admits the whole job at once, and may suspend it later. `kai` and `volcano` place all pods at once; they
    need KubeRay's operator to run with that batch scheduler. `default` starts pods one by one."""
    name: str | None = None
    """Name of the queue: a LocalQueue of Kueue, or a queue of KAI or Volcano."""
    priority: str | None = None
    """Priority class: a WorkloadPriorityClass with `kueue`, otherwise a PriorityClass."""

    @model_validator(mode="after")
    def _is_whole(self) -> QueueConfig:
        if self.scheduler == "default" and self.name is not None:
            raise ProblemError(Problem.unused("name", "with scheduler: default", remedy="Set queue.scheduler"))
        if self.scheduler != "default" and self.name is None:
            raise ProblemError(Problem("name", f"must be set with scheduler: {self.scheduler}"))
        return self


class KubernetesConfig(Config):
    """Settings of jobs on Kubernetes, which KubeRay 1.5.1 or later runs."""

    also_called: ClassVar[dict[str, str]] = {"env": "env_vars", "volume_mounts": "volumes", "pvc": "volumes"}

    context: str | None = None
    """Context of kubectl; its current one if not set."""
    namespace: str | None = None
    """Namespace; the namespace of the context if not set."""
    interactive: bool = False
    """Start only the Ray cluster, for `rl submit attach` and commands that you type there. It runs until `rl submit
    cancel`."""
    image: str | None = None
    """Image of all pods, with `rl` and `ray[default]` (see docs/images.md)."""
    image_pull_secrets: list[str] = []
    """Names of the secrets for pulling the image."""
    service_account: str | None = None
    """Service account of the pods; the namespace's default if not set. Its token is not mounted."""
    volumes: list[VolumeConfig] = []
    """Claims. The run directory must be on one of them, so that every attempt finds it."""
    runs_folder: str | None = None
    """Folder of run directories in the pods, such as `/shared/runs`. The run directory has the same name there as on
    this machine, where it only records the job. A `run_dir` that is on a volume itself is used as it is."""
    head: PodConfig = PodConfig(cpus=4, memory="16Gi")
    """The pod of the driver, without GPUs."""
    workers: PodConfig = PodConfig()
    """The pods of the models: one for each of `cluster.num_nodes`."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of the GPUs. Each worker requests `cluster.gpus_per_node`."""
    rdma: dict[str, int | str] = {}
    """RDMA resources of each worker, such as `rdma/hca_shared_devices_a: 1`, and others that the network needs, such as
    `hugepages-2Mi: 5120Mi`. The container runtime of the nodes must not limit locked memory."""
    queue: QueueConfig = QueueConfig()
    env_vars: dict[str, str] = {}
    """Environment variables of all pods, such as `HF_HOME: /shared/huggingface`. They are readable in the manifest."""
    secrets: list[SecretConfig] = []
    """Environment variables of all pods that come from secrets of the namespace."""
    run_as_user: int = Field(default=1000, gt=0)
    """User id of all processes. The images of this project have a user 1000."""
    run_as_group: int = Field(default=1000, gt=0)
    """Group id of all processes and of new files on the claims."""
    seccomp_profile: Literal["RuntimeDefault", "Unconfined"] = "RuntimeDefault"
    """System calls that the pods may make. Environments that run programs in a sandbox need user namespaces, which
    `RuntimeDefault` refuses."""
    save_margin_s: int = Field(default=300, ge=30)
    """Time in seconds that the run has to save and end when a pod is evicted, or the job is suspended or deleted."""
    max_attempts: int = Field(default=20, gt=0)
    """Maximum number of clusters in which the run is continued. Suspensions by Kueue are not counted."""
    max_attempts_without_checkpoint: int = Field(default=3, gt=0)
    """Maximum number of attempts in a row without a new checkpoint."""

    @field_validator("runs_folder")
    @classmethod
    def _is_absolute(cls, path: str | None) -> str | None:
        if path is not None and (not path.startswith("/") or ".." in path.split("/")):
            raise ProblemError(Problem("", "must be an absolute path without ..", got=path))
        return path

    @field_validator("rdma")
    @classmethod
    def _are_quantities(cls, resources: dict[str, int | str]) -> dict[str, int | str]:
        wrong = {name: value for name, value in resources.items() if not _QUANTITY.fullmatch(str(value))}
        if wrong:
            allowed = "a number or a quantity of Kubernetes, such as 5120Mi"
            raise ProblemError(*(Problem(name, got=value, allowed=allowed) for name, value in wrong.items()))
        return resources

    @field_validator("env_vars")
    @classmethod
    def _are_names(cls, variables: dict[str, str]) -> dict[str, str]:
        odd = [name for name in variables if not _VARIABLE.fullmatch(name)]
        secret = [name for name in variables if name.upper().endswith(_OF_SECRETS)]
        remedy = "Create a secret with kubectl create secret generic, and add it to secrets"
        problems = [Problem(name, "is not a valid name for an environment variable") for name in odd]
        problems += [Problem(name, "would be readable in the manifest", remedy=remedy) for name in secret]
        if problems:
            raise ProblemError(*problems)
        return variables

    @model_validator(mode="after")
    def _fits(self) -> KubernetesConfig:
        problems = [
            Problem(f"env_vars.{secret.env_var}", "is set by secrets as well", remedy="Remove one of them")
            for secret in self.secrets
            if secret.env_var in self.env_vars
        ]
        if self.interactive:
            attempts = ("max_attempts", "max_attempts_without_checkpoint")
            problems += [Problem.unused(name, "with interactive: true") for name in attempts if is_changed(self, name)]
        paths = [volume.path for volume in self.volumes]
        problems += [
            Problem(f"volumes[{place}].path", "is the path of an earlier volume", got=path)
            for place, path in enumerate(paths)
            if path in paths[:place]
        ]
        if problems:
            raise ProblemError(*problems)
        return self
