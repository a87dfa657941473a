"""The manifests of a job: a RayJob of KubeRay, or a RayCluster for interactive use, and the files of its pods."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

from rl_core.config import Config, Problem, load, refusal, tree_to_yaml
from rl_core.user_code import is_in_file
from rl_launch.run_session.directory.recording import copies_of
from rl_launch.submit.kubernetes.config import KubernetesConfig, PodConfig, QueueConfig
from rl_launch.submit.target import JobRequest

FILES = "/etc/rl/job"
"""Folder of the job's scripts, and of its recipe if that is a file, in all pods."""

SHARED_MEMORY, JOB_FILES = "shared-memory", "job-files"
"""Names of the volumes that are not claims."""

HEAD_PORT = 6379
WORKER_PORT = 6380
"""Ports of Ray's control store and of a worker's raylet."""

SHUTDOWN_MARGIN_S = 60
"""Time in seconds for Ray to end after the save."""

FILE_NAME = "recipe.yaml"
_SCRIPTS = ("run.sh", "stop.sh")
_NUM_NAME_CHARACTERS = 24
_MAX_BYTES = 1_000_000
"""Size of a ConfigMap that the API server accepts, with room for metadata."""


def manifests(request: JobRequest[KubernetesConfig]) -> list[dict[str, Any]]:
    """Return the manifests of a run.

    Raises:
        ConfigProblems: If the settings do not go with the run; lists all problems.
    """
    if problems := list(_problems(request)):
        raise refusal(problems, load({}))
    settings = request.settings
    labels = {
        # KubeRay itself sets app.kubernetes.io/name, and its services find the head by it
        "app.kubernetes.io/part-of": "rl",
        "app.kubernetes.io/instance": job_name(request),
        "app.kubernetes.io/managed-by": "rl-launch",
    }
    metadata: dict[str, Any] = {"name": job_name(request), "labels": {**labels, **_queued(settings.queue)[0]}}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    cluster = _cluster(request, labels)
    # the config of a recipe that is a file has the overrides
    of_file = [f"{FILES}/{FILE_NAME}"]
    train = [*request.command, *(of_file if _is_file(request) else [request.recipe, *request.overrides])]
    train.append(f"run_dir={run_folder(request)}")
    if settings.interactive:
        return [{"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": cluster}]
    job = {
        # submitted by the operator: a pod for that could be evicted, and is not part of a gang
        "submissionMode": "HTTPMode",
        "jobId": job_name(request),
        "entrypoint": f"bash {FILES}/run.sh {shlex.join(train)}",
        "backoffLimit": settings.max_attempts - 1,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _files(request)}
    return [config_map, {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": job}]


def to_text(documents: list[dict[str, Any]]) -> str:
    """Return manifests as a file for kubectl."""
    return "---\n".join(yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=120) for each in documents)


def job_name(request: JobRequest[KubernetesConfig]) -> str:
    """Return the name of the job of a run, which no other run has; a label of DNS that begins with a letter."""
    readable = re.sub(r"[^a-z0-9]+", "-", request.name.lower())[:_NUM_NAME_CHARACTERS].strip("-")
    digest = hashlib.sha256(str(run_folder(request) or request.run_dir).encode()).hexdigest()[:8]
    return "-".join(filter(None, ("rl", readable, digest)))


def run_folder(request: JobRequest[KubernetesConfig]) -> PurePosixPath | None:
    """Return the run directory in the pods; None if it is not on a volume that all pods write to."""
    settings, given = request.settings, PurePosixPath(request.run_dir)
    choices = [given, *([PurePosixPath(settings.runs_folder) / given.name] if settings.runs_folder else [])]
    writable = [volume.path for volume in settings.volumes if not volume.read_only]
    return next((each for each in choices if any(map(each.is_relative_to, writable))), None)


def recipe_files(config: Config, written: Mapping[str, Any]) -> dict[str, str]:
    """Return the contents of the files of a config, by name. `file.py:NAME` in it is a file next to it."""
    copies = copies_of(config)
    names = {file.path: name for name, file in copies.items()}
    tree = tree_to_yaml(_beside(dict(written), names))
    return {FILE_NAME: tree, **{name: file.text for name, file in copies.items()}}


def _beside(value: Any, names: dict[str, str]) -> Any:
    match value:
        case str() if is_in_file(value):
            path, _, attribute = value.rpartition(":")
            name = names.get(str(Path(path).expanduser().absolute()))
            return value if name is None else f"{name}:{attribute}"
        case dict():
            return {key: _beside(item, names) for key, item in value.items()}
        case list():
            return [_beside(item, names) for item in value]
        case _:
            return value


def _problems(request: JobRequest[KubernetesConfig]) -> Iterator[Problem]:
    settings = request.settings
    if settings.image is None:
        yield Problem("kubernetes.image", "must be set", remedy="See docs/images.md")
    for role in ("head", "workers"):
        for name in ("cpus", "memory"):
            if getattr(getattr(settings, role), name) is None:
                yield Problem(f"kubernetes.{role}.{name}", "must be set")
    if request.config.cluster.autoscaling:
        remedy = "Set cluster.num_nodes to the number of nodes"
        yield Problem("cluster.autoscaling", "the cluster of a job has a fixed size", got=True, remedy=remedy)
    if not settings.interactive and run_folder(request) is None:
        folders = [f"{volume.path}/..." for volume in settings.volumes if not volume.read_only]
        yield Problem(
            "kubernetes.runs_folder",
            "must be on a volume that all pods write to",
            got=settings.runs_folder,
            allowed=", ".join(folders) or "none, because kubernetes.volumes has no such volume",
        )
    if sum(len(text.encode()) for text in _files(request).values()) > _MAX_BYTES:
        yield Problem("", "the recipe and its code are larger than 1 MB", remedy="Put the code into the image")


def _cluster(request: JobRequest[KubernetesConfig], labels: dict[str, str]) -> dict[str, Any]:
    settings = request.settings
    num_gpus = request.gpus_per_node if request.device.has_gpus and not request.device.is_logical else 0
    devices = {settings.gpu_resource: str(num_gpus)} if num_gpus else {}
    devices |= {name: str(number) for name, number in settings.rdma.items()}
    return {
        "rayVersion": importlib.metadata.version("ray"),
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            # the models' ranks belong on the workers
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "port": str(HEAD_PORT), "dashboard-host": "0.0.0.0"},
            "template": _pod("ray-head", request, settings.head, labels, {}, port=HEAD_PORT),
        },
        "workerGroupSpecs": [
            {
                "groupName": "workers",
                **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), request.num_nodes),
                "rayStartParams": {"num-gpus": str(request.gpus_per_node), "node-manager-port": str(WORKER_PORT)},
                "template": _pod("ray-worker", request, settings.workers, labels, devices, port=WORKER_PORT),
            }
        ],
    }


def _queued(queue: QueueConfig) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """Return the additions of a queue to the manifests: labels of the job, which KubeRay copies to its cluster, labels
    of all pods, and fields of the specs of all pods."""
    name, priority = str(queue.name), queue.priority
    of_pods = {} if priority is None else {"priorityClassName": priority}
    match queue.scheduler:
        case "kueue":
            # its webhook suspends a job with this label until the job is admitted
            of_job = {"kueue.x-k8s.io/queue-name": name}
            return of_job | ({} if priority is None else {"kueue.x-k8s.io/priority-class": priority}), {}, {}
        case "kai":
            labels = {"kai.scheduler/queue": name}
            return labels, labels, {"schedulerName": "kai-scheduler", **of_pods}
        case "volcano":
            # the operator makes the pod group from these labels, and sets the scheduler of the pods
            of_job = {"volcano.sh/queue-name": name}
            return of_job | ({} if priority is None else {"ray.io/priority-class-name": priority}), {}, {}
        case _:
            return {}, {}, of_pods


def _pod(
    name: str,
    request: JobRequest[KubernetesConfig],
    pod: PodConfig,
    labels: Mapping[str, str],
    devices: Mapping[str, str],
    *,
    port: int,
) -> dict[str, Any]:
    """Return the template of a pod: the head with the driver and without GPUs, or a worker for a node of the run."""
    settings = request.settings
    _, pod_labels, pod_spec = _queued(settings.queue)
    metadata: dict[str, Any] = {"labels": {**labels, **pod_labels}}
    if pod.annotations:
        metadata["annotations"] = dict(pod.annotations)
    size = {"cpu": str(pod.cpus), "memory": str(pod.memory), **devices}
    literal = dict(settings.env_vars)
    if not settings.interactive:
        literal |= {
            "RL_RUN_DIR": str(run_folder(request)),
            "RL_JOB": job_name(request),
            "RL_MAX_ATTEMPTS_WITHOUT_CHECKPOINT": str(settings.max_attempts_without_checkpoint),
            # between SIGTERM and SIGKILL, when the job is stopped
            "RAY_JOB_STOP_WAIT_TIME_S": str(settings.save_margin_s),
        }
    secrets = {
        each.env_var: {"valueFrom": {"secretKeyRef": {"name": each.name, "key": each.key}}} for each in settings.secrets
    }
    memory = {"medium": "Memory", **({"sizeLimit": pod.shared_memory} if pod.shared_memory else {})}
    mounts: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "emptyDir": memory}]
    for volume in settings.volumes:
        mount: dict[str, Any] = {"name": volume.claim, "mountPath": volume.path}
        if volume.sub_path is not None:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    # a claim may be mounted in several places, but must be a volume of the pod once
    for claim in dict.fromkeys(volume.claim for volume in settings.volumes):
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    # probes that need no dashboard: a connection to Ray's own port; Ray itself checks that its processes work
    connects = {"tcpSocket": {"port": port}, "timeoutSeconds": 2, "periodSeconds": 5}
    container: dict[str, Any] = {
        "name": name,
        "image": settings.image,
        "env": [
            *({"name": name, "value": value} for name, value in literal.items()),
            *({"name": name, **source} for name, source in secrets.items()),
        ],
        "resources": {"requests": dict(size), "limits": dict(size)},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "startupProbe": {**connects, "failureThreshold": 60},
        "readinessProbe": {**connects, "failureThreshold": 10},
        "livenessProbe": {**connects, "failureThreshold": 120},
    }
    if not settings.interactive:
        mounts.append({"name": JOB_FILES, "mountPath": FILES, "readOnly": True})
        volumes.append({"name": JOB_FILES, "configMap": {"name": job_name(request)}})
        container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", f"{FILES}/stop.sh"]}}}
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": settings.save_margin_s + SHUTDOWN_MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.run_as_user,
            "runAsGroup": settings.run_as_group,
            "fsGroup": settings.run_as_group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": settings.seccomp_profile},
        },
        "containers": [container],
        "volumes": volumes,
        **pod_spec,
    }
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    if pod.node_selector:
        spec["nodeSelector"] = dict(pod.node_selector)
    if pod.tolerations:
        spec["tolerations"] = [
            {"operator": each.operator, **each.model_dump(exclude_none=True)} for each in pod.tolerations
        ]
    return {"metadata": metadata, "spec": spec}


def _files(request: JobRequest[KubernetesConfig]) -> dict[str, str]:
    scripts = {name: files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS}
    return scripts | (recipe_files(cast(Config, request.config), request.tree) if _is_file(request) else {})


def _is_file(request: JobRequest[KubernetesConfig]) -> bool:
    return Path(request.recipe).is_file()


class _Dumper(yaml.SafeDumper):
    """Writes strings of several lines as blocks, and shared parts anew in each place."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)
