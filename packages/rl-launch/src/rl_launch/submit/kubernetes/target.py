"""Kubernetes as a target of `rl submit`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from rl_core.config import Config
from rl_core.errors import RunDirectoryError
from rl_launch.submit.kubernetes.config import KubernetesConfig
from rl_launch.submit.kubernetes.kubectl import Job, kubectl, read, run
from rl_launch.submit.kubernetes.manifests import job_name, manifests, to_text
from rl_launch.submit.target import JobRequest, JobStatus, submission_of

_LOGS = ("driver.log", "job.log")
_LIST = f'cd "$RL_RUN_DIR/jobs" && stat --format="%s %n" "$RL_JOB".*/{{{",".join(_LOGS)}}} 2> /dev/null || true'
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
        """See `QueueTarget.render`."""
        return to_text(manifests(request))

    def warnings(self, request: JobRequest[KubernetesConfig]) -> Iterable[str]:
        """See `QueueTarget.warnings`."""
        return ()

    def shared_variables(self, request: JobRequest[KubernetesConfig]) -> Mapping[str, str] | None:
        """See `QueueTarget.shared_variables`. The pods read their volumes."""
        return None

    def submit(self, file: Path, request: JobRequest[KubernetesConfig]) -> tuple[str, ...]:
        """See `QueueTarget.submit`. A job of the same run that is over is replaced.

        Raises:
            RunDirectoryError: If a job of the same run is not over.
        """
        settings = request.settings
        command = kubectl(settings.context, settings.namespace)
        namespace = settings.namespace
        if namespace is None:
            shown = run([*command, "config", "view", "--minify", "--output=jsonpath={..namespace}"])
            namespace = shown.strip() or "default"
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
        if kind == "rayjob":
            # its files are deleted with it
            uid = (job.state() or {})["metadata"]["uid"]
            owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": job.name, "uid": uid}
            patch = {"metadata": {"ownerReferences": [owner]}}
            run(job.command("patch", "configmap", job.name, "--type=merge", f"--patch={json.dumps(patch)}"))
        return (job.id,)

    def status(self, job: str) -> JobStatus:
        """See `QueueTarget.status`."""
        found = Job.parse(job)
        state = found.state()
        if state is None:
            return JobStatus("", is_waiting=False, is_over=True, details={})
        status = state.get("status", {})
        if found.kind == "rayjob":
            return _of_job(status)
        facts = {"ready workers": status.get("readyWorkerReplicas"), "reason": status.get("reason")}
        details = {name: str(value) for name, value in facts.items() if value}
        word = status.get("state") or "New"
        return JobStatus(word, is_waiting=word != "ready", is_over=False, details=details)

    def cancel(self, job: str, *, at_once: bool) -> str:
        """See `QueueTarget.cancel`."""
        found = Job.parse(job)
        run(found.command("delete", found.kind, found.name, "--ignore-not-found", "--wait=false"))
        if at_once:
            run(found.command("delete", "pods", f"--selector={found.pods}", "--grace-period=1", "--wait=false"))
            return f"{job} is deleted, and its pods are ended"
        if found.kind == "raycluster":
            return f"{job} is deleted"
        return f"{job} is deleted; the run saves after its step and ends"

    def attempts(self, jobs: Path) -> Sequence[Path]:
        """See `QueueTarget.attempts`. Copies new lines of the logs to this machine while the cluster exists."""
        job = Job.parse(submission_of(jobs.parent).jobs[-1])
        _fetch_logs(job, jobs)
        if job.kind == "raycluster":
            return [jobs / job.name]  # nothing is logged there, but `attach` has its place
        found = [(match, path) for path in jobs.glob(f"{job.name}.*") if (match := _ATTEMPT.fullmatch(path.name))]
        return [path for _, path in sorted(found, key=lambda each: int(each[0][1]))]

    def attach(self, attempt: Path, node: str) -> Sequence[str]:
        """See `QueueTarget.attach`.

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


def _of_job(status: dict[str, Any]) -> JobStatus:
    """Return the state of a RayJob: the state of its deployment, or of the driver once there is one."""
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


def _fetch_logs(job: Job, folder: Path) -> None:
    """Add to the logs in a folder the lines that the head of a job has beyond them; none if it is not running.

    Args:
        job: The job.
        folder: Gets a folder for each attempt, as the run directory has.
    """
    head = job.head() if job.kind == "rayjob" else None
    if head is None:
        return
    for line in run(job.command("exec", head, "--", "bash", "-c", _LIST)).splitlines():
        size, _, name = line.partition(" ")
        relative = PurePosixPath(name)
        # the lines come from a volume that others write to
        if len(relative.parts) != 2 or relative.name not in _LOGS or not relative.parts[0].startswith(f"{job.name}."):
            continue
        file = folder.joinpath(*relative.parts)
        start = file.stat().st_size if file.is_file() else 0
        if start >= int(size):
            continue
        tail = f'tail --bytes=+{start + 1} "$RL_RUN_DIR/jobs/"{shlex.quote(name)}'
        new = read(job.command("exec", head, "--", "bash", "-c", tail))
        file.parent.mkdir(exist_ok=True)
        with file.open("ab") as local:
            local.write(new)
