"""How a job asks a scheduler to start all of its pods together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_launch.submit.kubernetes.config import QueueConfig


@dataclass(frozen=True)
class Queued:
    """What a queue adds to the manifests.

    Args:
        job_labels: Labels of the job, which KubeRay copies to its cluster.
        pod_labels: Labels of all pods.
        pod_spec: Fields of the specs of all pods.
    """

    job_labels: Mapping[str, str] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)
    pod_spec: Mapping[str, Any] = field(default_factory=dict)


def queued(queue: QueueConfig) -> Queued:
    """Return what a queue adds to the manifests."""
    return _SCHEDULERS[queue.scheduler](queue)


def _default(queue: QueueConfig) -> Queued:
    return Queued(pod_spec=_priority(queue))


def _kueue(queue: QueueConfig) -> Queued:
    # its webhook suspends a job with this label until the job is admitted
    labels = {"kueue.x-k8s.io/queue-name": str(queue.name)}
    if queue.priority is not None:
        labels["kueue.x-k8s.io/priority-class"] = queue.priority
    return Queued(job_labels=labels)


def _kai(queue: QueueConfig) -> Queued:
    labels = {"kai.scheduler/queue": str(queue.name)}
    return Queued(labels, labels, {"schedulerName": "kai-scheduler", **_priority(queue)})


def _volcano(queue: QueueConfig) -> Queued:
    # the operator makes the pod group from these labels, and sets the scheduler of the pods
    labels = {"volcano.sh/queue-name": str(queue.name)}
    if queue.priority is not None:
        labels["ray.io/priority-class-name"] = queue.priority
    return Queued(job_labels=labels)


def _priority(queue: QueueConfig) -> dict[str, str]:
    return {} if queue.priority is None else {"priorityClassName": queue.priority}


_SCHEDULERS: Mapping[str, Callable[[QueueConfig], Queued]] = {
    "default": _default,
    "kueue": _kueue,
    "kai": _kai,
    "volcano": _volcano,
}
