"""Kubernetes as a target of `rl submit`, through kubectl."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from rl_core.config import Config
from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_launch.submit.kubernetes.config import KubernetesConfig
from rl_launch.submit.kubernetes.manifests import job_name, manifests, to_text
from rl_launch.submit.target import JobRequest, JobStatus, submission_of

_TIMEOUT_S = 120.0
_LOGS = ("driver.log", "job.log")
_LIST = f'cd "$RL_RUN_DIR/jobs" && stat --format="%s %n" "$RL_JOB".*/{{{",".join(_LOGS)}}} 2> /dev/null || true'
_OVER = ("Complete", "Failed")
_ATTEMPT = re.compile(r".*\.(\d+)")


class KubectlError(RLError):
    """kubectl failed; the message is its own."""


@dataclass(frozen=True)
class Job:
    """The object of a job in a cluster.

    Args:
        kind: `rayjob` or `raycluster`.
        name: Its name.
        namespace: Its namespace.
        context: Context of kubectl; empty for the current one.
    """

    kind: str
    name: str
    namespace: str
    context: str = ""

    @classmethod
    def parse(cls, id: str) -> Job:
        """Return the job of an id."""
        place, _, context = id.partition("@")
        namespace, kind, name = place.split("/")
        return cls(kind, name, namespace, context)

    @property
    def id(self) -> str:
        """`NAMESPACE/KIND/NAME`, followed by `@CONTEXT` if it has one."""
        return f"{self.namespace}/{self.kind}/{self.name}{f'@{self.context}' if self.context else ''}"

    @property
    def pods(self) -> str:
        """Selector of its pods."""
        return f"app.kubernetes.io/instance={self.name}"

    def command(self, *words: str) -> list[str]:
        """Return a command of kubectl in the job's namespace."""
        return [*kubectl(self.context, self.namespace), *words]

    def state(self) -> dict[str, Any] | None:
        """Return the object as the cluster has it; None if it does not exist."""
        shown = run(self.command("get", self.kind, self.name, "--ignore-not-found", "--output=json"))
        return json.loads(shown) if shown.strip() else None

    def head(self) -> str | None:
        """Return the name of the running pod of the head, if there is one."""
        selector = f"--selector={self.pods},ray.io/node-type=head"
        running = "--field-selector=status.phase=Running"
        shown = run(self.command("get", "pods", selector, running, "--output=name"))
        return next(iter(shown.split()), None)


def kubectl(context: str | None, namespace: str | None) -> list[str]:
    """Return the beginning of a command of kubectl.

    Raises:
        ConfigError: If it is not installed.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on the PATH. Install it, or use --dry-run and apply the manifest elsewhere.")
    chosen = {"--context": context, "--namespace": namespace}
    return ["kubectl", *(f"{option}={value}" for option, value in chosen.items() if value)]


def run(command: Sequence[str]) -> str:
    """Run a command of kubectl; returns what it prints.

    Raises:
        KubectlError: If it fails.
    """
    return read(command).decode(errors="replace")


def read(command: Sequence[str]) -> bytes:
    """Run a command of kubectl as `run` does; returns the bytes that it prints."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KubectlError(f"kubectl has not answered within {_TIMEOUT_S:.0f} s: {' '.join(command[:4])}") from None
    if done.returncode:
        raise KubectlError(done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}")
    return done.stdout


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
