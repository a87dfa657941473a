"""Slurm as a target of `rl submit`, by its own commands."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from rl_core.config import Config
from rl_core.errors import ConfigError, RLError
from rl_launch.submit.slurm.config import SlurmConfig
from rl_launch.submit.slurm.script import outside_mounts, render
from rl_launch.submit.target import JobRequest, JobStatus

RAY_VARIABLES = "ray.env"
"""File of an attempt that sets the variables that a shell needs to reach its Ray."""

_SAVE_AND_CANCEL = "USR2"
_ATTEMPT = re.compile(r"(\d+)\.(\d+)")
_TIMEOUT_S = 60.0
_UNKNOWN = re.compile(r"invalid job id", re.IGNORECASE)
_DETAILS = {
    "nodes": "NodeList",
    "restarts": "Restarts",
    "reason": "Reason",
    "running for": "RunTime",
    "limit": "TimeLimit",
    "start": "StartTime",
}
_NOTHING = ("", "(null)", "None", "Unknown", "0", "00:00:00", "N/A")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ACTIVE = (*_WAITING, "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


class QueueError(RLError):
    """Slurm refused a command; the message is Slurm's."""


class SlurmTarget:
    """Jobs of Slurm. A job runs the batch script of `rl_launch.submit.slurm.script`."""

    name: ClassVar[str] = "slurm"
    settings: ClassVar[type[Config]] = SlurmConfig
    file_name: ClassVar[str] = "slurm.sh"
    render = staticmethod(render)

    def warnings(self, request: JobRequest[SlurmConfig]) -> Iterable[str]:
        """See `QueueTarget.warnings`."""
        for name, path in outside_mounts(request).items():
            yield (
                f"slurm.env_vars.{name}: {path} is below no mount of the container, so its files are lost with the "
                "container. Add the folder to slurm.container.mounts"
            )

    def shared_variables(self, request: JobRequest[SlurmConfig]) -> Mapping[str, str] | None:
        """See `QueueTarget.shared_variables`. A container may have a cache of its image."""
        return request.settings.env_vars if request.settings.container.image is None else None

    def submit(self, file: Path, request: JobRequest[SlurmConfig]) -> tuple[str, ...]:
        """See `QueueTarget.submit`."""
        # refused if, for example, the partition does not exist
        _run("sbatch", "--test-only", str(file))
        num_jobs = request.settings.max_jobs if request.settings.continuation == "dependency" else 1
        jobs: list[str] = []
        try:
            for _ in range(num_jobs):
                jobs.append(_run("sbatch", "--parsable", str(file)).strip().partition(";")[0])
        except QueueError:
            for job in jobs:
                _run("scancel", job)
            raise
        return tuple(jobs)

    def status(self, job: str) -> JobStatus:
        """See `QueueTarget.status`. An array has the state of its running task, or else of the next or last one."""
        try:
            shown = _run("scontrol", "--oneliner", "show", "job", job)
        except QueueError as error:
            if _UNKNOWN.search(str(error)):
                return _from_accounting(job)
            raise
        tasks = [dict(re.findall(r"\b(\w+)=(\S*)", line)) for line in shown.splitlines() if line.startswith("JobId=")]
        tasks.sort(
            key=lambda each: (each["JobState"] not in ("RUNNING", "COMPLETING"), each["JobState"] not in _ACTIVE)
        )
        found = tasks[0]
        state = found["JobState"]
        details = {name: found.get(field, "") for name, field in _DETAILS.items()}
        details |= {} if state in _ACTIVE else {"exit code": found.get("ExitCode", "")}
        return _status(state, {name: value for name, value in details.items() if value not in _NOTHING})

    def cancel(self, job: str, *, at_once: bool) -> str:
        """See `QueueTarget.cancel`."""
        status = self.status(job)
        if status.is_over:
            return f"job {job} is over ({status.state or 'unknown to Slurm'})"
        if status.is_waiting or at_once:
            _run("scancel", job)
            return f"job {job} is cancelled"
        # if other tasks of its array wait, Slurm reports a failure of the signal
        _run("scancel", "--state=PENDING", job)
        _run("scancel", "--state=RUNNING", "--batch", f"--signal={_SAVE_AND_CANCEL}", job)
        return f"job {job} saves after its step and ends; --now ends it at once"

    def attempts(self, jobs: Path) -> Sequence[Path]:
        """See `QueueTarget.attempts`."""
        found = [(match, path) for path in jobs.iterdir() if (match := _ATTEMPT.fullmatch(path.name)) and path.is_dir()]
        return [path for _, path in sorted(found, key=lambda each: (int(each[0][1]), int(each[0][2])))]

    def attach(self, attempt: Path, node: str) -> Sequence[str]:
        """See `QueueTarget.attach`."""
        job = attempt.name.partition(".")[0]
        where = [f"--nodelist={node}"] if node else []
        shell = f". {shlex.quote(str(attempt / RAY_VARIABLES))}; exec bash -i"
        return ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", *where, "--pty", "bash", "-c", shell]


def _status(state: str, details: Mapping[str, str]) -> JobStatus:
    return JobStatus(state, is_waiting=state in _WAITING, is_over=state not in _ACTIVE, details=details)


def _from_accounting(job: str) -> JobStatus:
    """Return the state of a job that the controller has forgotten, if the site keeps accounts."""
    options = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode,Elapsed,NodeList,End")
    try:
        lines = _run("sacct", *options, f"--jobs={job}").splitlines()
    except (QueueError, ConfigError):
        lines = []
    if not lines:
        return _status("", {})
    state, code, elapsed, nodes, end = lines[-1].split("|")
    # "CANCELLED by 1000"
    word = state.partition(" ")[0]
    return _status(word, {"nodes": nodes, "ran for": elapsed, "ended": end, "exit code": code})


def _run(program: str, *arguments: str) -> str:
    """Run a command of Slurm and return its output.

    Raises:
        ConfigError: If it is not installed on this machine.
        QueueError: If it fails.
    """
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not installed on this machine. Run this on a login node of the Slurm cluster, or print the "
            "script with --dry-run and submit it there."
        )
    command, nothing = [program, *arguments], subprocess.DEVNULL
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=nothing)
    except subprocess.TimeoutExpired:
        question = "Is the Slurm controller reachable?"
        raise QueueError(f"{program} did not answer within {_TIMEOUT_S:.0f} s. {question}") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise QueueError(f"{program} failed with exit code {done.returncode}: {words}")
    return done.stdout
