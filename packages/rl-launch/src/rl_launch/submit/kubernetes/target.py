"""Kubernetes as a target of `rl submit`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rl_core.config import Config
from rl_core.errors import RunDirectoryError
from rl_launch.submit.kubernetes.config import KubernetesConfig
from rl_launch.submit.kubernetes.driver_logs import fetch_logs
from rl_launch.submit.kubernetes.kubectl import Job, kubectl, run
from rl_launch.submit.kubernetes.manifests import job_name, manifests, to_text
from rl_launch.submit.record import submission_of
from rl_launch.submit.target import JobRequest, JobStatus

_OVER = ("Complete", "Failed")
_ATTEMPT = re.compile(r".*\.(\d+)")


@dataclass(frozen=True)
class KubernetesTarget:
    """RayJobs of KubeRay. Their run directories are on a volume of the cluster; the folder of a run on this machine
    records its job and receives the logs of its drivers."""

    name: ClassVar[str] = "kubernetes"
    settings: ClassVar[type[Config]] = KubernetesConfig
    file_name: ClassVar[str] = "kubernetes.yaml"

    def render(self, request: JobRequest[KubernetesConfig]) -> str:
        """See `Target.render`."""
        return to_text(manifests(request))

    def warnings(self, request: JobRequest[KubernetesConfig]) -> Iterable[str]:
        """See `Target.warnings`."""
        return ()

    def shared_variables(self, request: JobRequest[KubernetesConfig]) -> Mapping[str, str] | None:
        """See `Target.shared_variables`. The pods read their volumes."""
        return None

    def submit(self, file: Path, request: JobRequest[KubernetesConfig]) -> tuple[str, ...]:
        """See `Target.submit`. A job of the same run that is over is replaced.

        Raises:
            RunDirectoryError: If a job of the same run is not over.
        """
        settings = request.settings
        command = kubectl(settings.context, settings.namespace)
        namespace = settings.namespace or _default_namespace(command)
        kind = "raycluster" if settings.interactive else "rayjob"
        job = Job(kind, job_name(request), namespace, settings.context or "")
        status = self.status(job.id)
        if not status.is_over:
            raise RunDirectoryError(
                f"{request.run_dir} has a job already: {job.id} ({status.state}). Wait for it, or end it with "
                f"kubectl delete {kind} {job.name} --namespace={namespace}."
            )
        run([*command, "delete", "--ignore-not-found", f"--filename={file}"])
        run([*command, "create", "--validate=strict", f"--filename={file}"])
        _own_files(job)
        return (job.id,)

    def status(self, job: str) -> JobStatus:
        """See `Target.status`."""
        found = Job.parse(job)
        state = found.state()
        if state is None:
            return JobStatus("", is_waiting=False, is_over=True, details={})
        return _of_job(state.get("status", {})) if found.kind == "rayjob" else _of_cluster(state.get("status", {}))

    def cancel(self, job: str, *, at_once: bool) -> str:
        """See `Target.cancel`."""
        found = Job.parse(job)
        run(found.command("delete", found.kind, found.name, "--ignore-not-found", "--wait=false"))
        if at_once:
            run(found.command("delete", "pods", f"--selector={found.pods}", "--grace-period=1", "--wait=false"))
            return f"{job} is deleted, and its pods are ended"
        if found.kind == "raycluster":
            return f"{job} is deleted"
        return f"{job} is deleted; the run saves after its step and ends"

    def attempts(self, jobs: Path) -> Sequence[Path]:
        """See `Target.attempts`. Copies what is new in the logs to this machine, as long as the cluster is there."""
        job = Job.parse(submission_of(jobs.parent).jobs[-1])
        fetch_logs(job, jobs)
        if job.kind == "raycluster":
            return [jobs / job.name]  # nothing is logged there, but `attach` has its place
        found = [(match, path) for path in jobs.glob(f"{job.name}.*") if (match := _ATTEMPT.fullmatch(path.name))]
        return [path for _, path in sorted(found, key=lambda each: int(each[0][1]))]

    def attach(self, attempt: Path, node: str) -> Sequence[str]:
        """See `Target.attach`.

        Args:
            attempt: Folder of an attempt.
            node: Name of a pod; empty for the head.

        Raises:
            RunDirectoryError: If the head is not running.
        """
        job = Job.parse(submission_of(attempt.parent.parent).jobs[-1])
        pod = node or job.head()
        if pod is None:
            raise RunDirectoryError(f"the head of {job.id} is not running. See kubectl get pods --selector={job.pods}")
        return job.command("exec", "--stdin", "--tty", pod, "--", "bash")


def _default_namespace(command: Sequence[str]) -> str:
    shown = run([*command, "config", "view", "--minify", "--output=jsonpath={..namespace}"])
    return shown.strip() or "default"


def _own_files(job: Job) -> None:
    """Let the files of a job be deleted with it."""
    if job.kind != "rayjob":
        return
    state = job.state() or {}
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": job.name, "uid": state["metadata"]["uid"]}
    patch = {"metadata": {"ownerReferences": [owner]}}
    run(job.command("patch", "configmap", job.name, "--type=merge", f"--patch={json.dumps(patch)}"))


def _of_job(status: dict[str, Any]) -> JobStatus:
    """The state of a RayJob: that of its deployment, or of the driver once there is one."""
    deployment = status.get("jobDeploymentStatus") or "New"
    starts = deployment not in ("Running", *_OVER)
    facts = {
        "cluster": status.get("rayClusterName"),
        "failed attempts": status.get("failed"),
        "reason": status.get("reason"),
        "message": status.get("message"),
    }
    return JobStatus(
        deployment if starts else status.get("jobStatus") or deployment,
        is_waiting=starts,
        is_over=deployment in _OVER,
        details={name: str(value) for name, value in facts.items() if value},
    )


def _of_cluster(status: dict[str, Any]) -> JobStatus:
    state = status.get("state") or "New"
    facts = {"ready workers": status.get("readyWorkerReplicas"), "reason": status.get("reason")}
    details = {name: str(value) for name, value in facts.items() if value}
    return JobStatus(state, is_waiting=state != "ready", is_over=False, details=details)
