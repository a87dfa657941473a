"""The pods of a job: a head with the driver and without GPUs, and a worker for each node of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_launch.submit.kubernetes.config import KubernetesConfig, PodConfig, QueueConfig


@dataclass(frozen=True)
class Queued:
    """Labels and fields that a queue adds to the manifests.

    Args:
        job_labels: Labels of the job, which KubeRay copies to its cluster.
        pod_labels: Labels of all pods.
        pod_spec: Fields of the specs of all pods.
    """

    job_labels: Mapping[str, str] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    pod_spec: Mapping[str, Any] = field(default_factory=dict)


def queued(queue: QueueConfig) -> Queued:
    """Return the labels and fields that a queue adds to the manifests."""
    priority = {} if queue.priority is None else {"priorityClassName": queue.priority}
    match queue.scheduler:
        case "kueue":
            # its webhook suspends a job with this label until the job is admitted
            labels = {"kueue.x-k8s.io/queue-name": str(queue.name)}
            if queue.priority is not None:
                labels["kueue.x-k8s.io/priority-class"] = queue.priority
            return Queued(job_labels=labels)
        case "kai":
            labels = {"kai.scheduler/queue": str(queue.name)}
            return Queued(labels, labels, {"schedulerName": "kai-scheduler", **priority})
        case "volcano":
            # the operator makes the pod group from these labels, and sets the scheduler of the pods
            labels = {"volcano.sh/queue-name": str(queue.name)}
            if queue.priority is not None:
                labels["ray.io/priority-class-name"] = queue.priority
            return Queued(job_labels=labels)
        case _:
            return Queued(pod_spec=priority)


FILES = "/etc/rl/job"
"""Folder of the job's scripts, and of its recipe if that is a file, in all pods."""

SHARED_MEMORY, JOB_FILES = "shared-memory", "job-files"
"""Names of the volumes that are not claims."""

HEAD_PORT = 6379
WORKER_PORT = 6380
"""Ports of Ray's control store and of a worker's raylet."""

SHUTDOWN_MARGIN_S = 60
"""Time in seconds for Ray to end after the save."""


class PodSetting(NamedTuple):
    """Settings that all pods of a job share.

    Args:
        settings: Settings of the job.
        queue: Labels and fields that its queue adds.
        labels: Labels of the job.
        variables: Environment variables that the job sets itself.
        files: Name of the ConfigMap of the job's files; empty if it has none.
    """

    settings: KubernetesConfig
    queue: Queued
    labels: Mapping[str, str]
    variables: Mapping[str, str]
    files: str


def head(setting: PodSetting) -> dict[str, Any]:
    """Return the pod template of the head."""
    return _template("ray-head", setting, setting.settings.head, {}, port=HEAD_PORT)


def worker(setting: PodSetting, num_gpus: int) -> dict[str, Any]:
    """Return the pod template of the workers.

    Args:
        setting: Settings that all pods share.
        num_gpus: GPUs of each, 0 without.
    """
    settings = setting.settings
    devices = {settings.gpu_resource: str(num_gpus)} if num_gpus else {}
    devices |= {name: str(number) for name, number in settings.rdma.items()}
    return _template("ray-worker", setting, settings.workers, devices, port=WORKER_PORT)


def _template(
    name: str, setting: PodSetting, pod: PodConfig, devices: Mapping[str, str], *, port: int
) -> dict[str, Any]:
    settings = setting.settings
    metadata: dict[str, Any] = {"labels": {**setting.labels, **setting.queue.pod_labels}}
    if pod.annotations:
        metadata["annotations"] = dict(pod.annotations)
    size = {"cpu": str(pod.cpus), "memory": str(pod.memory), **devices}
    literal = {**settings.env_vars, **setting.variables}
    secrets = {
        each.env_var: {"valueFrom": {"secretKeyRef": {"name": each.name, "key": each.key}}} for each in settings.secrets
    }
    mounts, volumes = _storage(setting, pod)
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
    if setting.files:
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
        **setting.queue.pod_spec,
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


def _storage(setting: PodSetting, pod: PodConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the mounts of a container, and the volumes of its pod."""
    memory = {"medium": "Memory", **({"sizeLimit": pod.shared_memory} if pod.shared_memory else {})}
    mounts: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "emptyDir": memory}]
    for volume in setting.settings.volumes:
        mount: dict[str, Any] = {"name": volume.claim, "mountPath": volume.path}
        if volume.sub_path is not None:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    # a claim may be mounted in several places, but must be a volume of the pod once
    for claim in dict.fromkeys(volume.claim for volume in setting.settings.volumes):
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    if setting.files:
        mounts.append({"name": JOB_FILES, "mountPath": FILES, "readOnly": True})
        volumes.append({"name": JOB_FILES, "configMap": {"name": setting.files}})
    return mounts, volumes
