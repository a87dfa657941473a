"""The pods of a job: a head with the driver and without GPUs, and a worker for each node of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_launch.submit.kubernetes.config import KubernetesConfig, PodConfig, TolerationConfig
from rl_launch.submit.kubernetes.queues import Queued

FILES = "/etc/rl/job"
"""Folder of the job's scripts, and of its recipe if that is a file, in all pods."""

SHARED_MEMORY, JOB_FILES = "shared-memory", "job-files"
"""Names of the volumes that are not claims."""

HEAD_PORT = 6379
WORKER_PORT = 6380
"""Ports of Ray's control store and of a worker's raylet."""

SHUTDOWN_MARGIN_S = 60
"""Time in seconds after the save in which Ray ends."""


@dataclass(frozen=True)
class PodSetting:
    """What all pods of a job share.

    Args:
        settings: Settings of the job.
        queue: What its queue adds.
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
    return _template("ray-head", setting, setting.settings.head, _size(setting.settings.head), port=HEAD_PORT)


def worker(setting: PodSetting, num_gpus: int) -> dict[str, Any]:
    """Return the pod template of the workers.

    Args:
        setting: What all pods share.
        num_gpus: GPUs of each, 0 without.
    """
    settings = setting.settings
    devices = {settings.gpu_resource: str(num_gpus)} if num_gpus else {}
    devices |= {name: str(number) for name, number in settings.rdma.items()}
    size = _size(settings.workers) | devices
    return _template("ray-worker", setting, settings.workers, size, port=WORKER_PORT)


def _template(name: str, setting: PodSetting, pod: PodConfig, size: Mapping[str, str], *, port: int) -> dict[str, Any]:
    settings = setting.settings
    metadata: dict[str, Any] = {"labels": {**setting.labels, **setting.queue.pod_labels}}
    if pod.annotations:
        metadata["annotations"] = dict(pod.annotations)
    container = {
        "name": name,
        "image": settings.image,
        "env": _environment(setting),
        "resources": {"requests": dict(size), "limits": dict(size)},
        "volumeMounts": _mounts(setting),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **_probes(port),
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": settings.save_margin_s + SHUTDOWN_MARGIN_S,
        "securityContext": _pod_security(settings),
        "containers": [container],
        "volumes": _volumes(setting, pod),
        **setting.queue.pod_spec,
    }
    if setting.files:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["bash", f"{FILES}/stop.sh"]}}}
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in settings.image_pull_secrets]
    if pod.node_selector:
        spec["nodeSelector"] = dict(pod.node_selector)
    if pod.tolerations:
        spec["tolerations"] = [_toleration(each) for each in pod.tolerations]
    return {"metadata": metadata, "spec": spec}


def _size(pod: PodConfig) -> dict[str, str]:
    return {"cpu": str(pod.cpus), "memory": str(pod.memory)}


def _environment(setting: PodSetting) -> list[dict[str, Any]]:
    literal = {**setting.settings.env_vars, **setting.variables}
    from_secrets = [
        {"name": each.env_var, "valueFrom": {"secretKeyRef": {"name": each.name, "key": each.key}}}
        for each in setting.settings.secrets
    ]
    return [*({"name": name, "value": value} for name, value in literal.items()), *from_secrets]


def _mounts(setting: PodSetting) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}]
    for volume in setting.settings.volumes:
        mount: dict[str, Any] = {"name": volume.claim, "mountPath": volume.path}
        if volume.sub_path is not None:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    if setting.files:
        mounts.append({"name": JOB_FILES, "mountPath": FILES, "readOnly": True})
    return mounts


def _volumes(setting: PodSetting, pod: PodConfig) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", **({"sizeLimit": pod.shared_memory} if pod.shared_memory else {})}
    volumes: list[dict[str, Any]] = [{"name": SHARED_MEMORY, "emptyDir": memory}]
    # a claim may be mounted in several places, but must be a volume of the pod once
    for claim in dict.fromkeys(volume.claim for volume in setting.settings.volumes):
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    if setting.files:
        volumes.append({"name": JOB_FILES, "configMap": {"name": setting.files}})
    return volumes


def _probes(port: int) -> dict[str, Any]:
    """Probes that need no dashboard: a connection to Ray's own port. Ray itself checks that its processes work."""
    connects = {"tcpSocket": {"port": port}, "timeoutSeconds": 2, "periodSeconds": 5}
    return {
        "startupProbe": {**connects, "failureThreshold": 60},
        "readinessProbe": {**connects, "failureThreshold": 10},
        "livenessProbe": {**connects, "failureThreshold": 120},
    }


def _pod_security(settings: KubernetesConfig) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": settings.run_as_user,
        "runAsGroup": settings.run_as_group,
        "fsGroup": settings.run_as_group,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": settings.seccomp_profile},
    }


def _toleration(toleration: TolerationConfig) -> dict[str, str]:
    fields = {"key": toleration.key, "value": toleration.value, "effect": toleration.effect}
    return {"operator": toleration.operator, **{name: value for name, value in fields.items() if value is not None}}
