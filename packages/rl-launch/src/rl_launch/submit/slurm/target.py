"""Slurm as a target of `rl submit`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl_core.config import Config
from rl_launch.submit.slurm import queue
from rl_launch.submit.slurm.config import SlurmConfig
from rl_launch.submit.slurm.container import outside_mounts
from rl_launch.submit.slurm.script import render
from rl_launch.submit.target import JobRequest, JobStatus

RAY_VARIABLES = "ray.env"
"""File of an attempt that sets the variables by which a shell reaches its Ray."""

_SAVE_AND_CANCEL = "USR2"
_ATTEMPT = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True)
class SlurmTarget:
    """Jobs of Slurm. A job runs the batch script of `rl_launch.submit.slurm.script`."""

    name: ClassVar[str] = "slurm"
    settings: ClassVar[type[Config]] = SlurmConfig
    file_name: ClassVar[str] = "slurm.sh"

    def render(self, request: JobRequest[SlurmConfig]) -> str:
        """See `Target.render`."""
        return render(request)

    def warnings(self, request: JobRequest[SlurmConfig]) -> Iterable[str]:
        """See `Target.warnings`."""
        for name, path in outside_mounts(request).items():
            yield (
                f"slurm.env_vars.{name}: {path} is below no mount of the container, so its files are lost with the "
                "container. Add the folder to slurm.container.mounts"
            )

    def shared_variables(self, request: JobRequest[SlurmConfig]) -> Mapping[str, str] | None:
        """See `Target.shared_variables`. A container may have a cache of its image."""
        return request.settings.env_vars if request.settings.container.image is None else None

    def submit(self, file: Path, request: JobRequest[SlurmConfig]) -> tuple[str, ...]:
        """See `Target.submit`."""
        queue.check(file)
        num_jobs = request.settings.max_jobs if request.settings.continuation == "dependency" else 1
        jobs: list[str] = []
        try:
            for _ in range(num_jobs):
                jobs.append(queue.submit(file))
        except queue.QueueError:
            for job in jobs:
                queue.cancel(job)
            raise
        return tuple(jobs)

    def status(self, job: str) -> JobStatus:
        """See `Target.status`."""
        return queue.status(job)

    def cancel(self, job: str, *, at_once: bool) -> str:
        """See `Target.cancel`."""
        status = queue.status(job)
        if status.is_over:
            return f"job {job} is over ({status.state or 'unknown to Slurm'})"
        if status.is_waiting or at_once:
            queue.cancel(job)
            return f"job {job} is cancelled"
        queue.cancel(job, only_waiting=True)
        queue.signal(job, _SAVE_AND_CANCEL)
        return f"job {job} saves after its step and ends; --now ends it at once"

    def attempts(self, jobs: Path) -> Sequence[Path]:
        """See `Target.attempts`."""
        found = [(match, path) for path in jobs.iterdir() if (match := _ATTEMPT.fullmatch(path.name)) and path.is_dir()]
        return [path for _, path in sorted(found, key=lambda each: (int(each[0][1]), int(each[0][2])))]

    def attach(self, attempt: Path, node: str) -> Sequence[str]:
        """See `Target.attach`."""
        job = attempt.name.partition(".")[0]
        where = [f"--nodelist={node}"] if node else []
        shell = f". {shlex.quote(str(attempt / RAY_VARIABLES))}; exec bash -i"
        return ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", *where, "--pty", "bash", "-c", shell]
