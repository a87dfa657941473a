"""Slurm's commands: submit a script, ask for the state of a job, signal and cancel it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from rl_core.errors import ConfigError, RLError
from rl_launch.submit.target import JobStatus

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


def check(script: Path) -> None:
    """Ask Slurm whether it would take a script.

    Raises:
        QueueError: If it would not, for example because the partition does not exist.
        ConfigError: If Slurm is not installed here.
    """
    _run("sbatch", "--test-only", str(script))


def submit(script: Path) -> str:
    """Submit a script; returns the id of the job."""
    return _run("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def status(job: str) -> JobStatus:
    """Return the state of a job; of an array, the state of the task that runs, or else of the next or last one."""
    try:
        shown = _run("scontrol", "--oneliner", "show", "job", job)
    except QueueError as error:
        if _UNKNOWN.search(str(error)):
            return _from_accounting(job)
        raise
    tasks = [dict(re.findall(r"\b(\w+)=(\S*)", line)) for line in shown.splitlines() if line.startswith("JobId=")]
    tasks.sort(key=lambda task: (task["JobState"] not in ("RUNNING", "COMPLETING"), task["JobState"] not in _ACTIVE))
    found = tasks[0]
    details = {name: found.get(field, "") for name, field in _DETAILS.items()}
    details |= {} if found["JobState"] in _ACTIVE else {"exit code": found.get("ExitCode", "")}
    return JobStatus(
        found["JobState"],
        is_waiting=found["JobState"] in _WAITING,
        is_over=found["JobState"] not in _ACTIVE,
        details={name: value for name, value in details.items() if value not in _NOTHING},
    )


def signal(job: str, name: str) -> None:
    """Send a signal to the batch script of a running job. If other tasks of its array wait, Slurm reports a failure."""
    _run("scancel", "--state=RUNNING", "--batch", f"--signal={name}", job)


def cancel(job: str, *, only_waiting: bool = False) -> None:
    """Cancel a job, or all tasks of an array; with `only_waiting` those that do not run."""
    _run("scancel", *(["--state=PENDING"] if only_waiting else []), job)


def _from_accounting(job: str) -> JobStatus:
    """Return the state of a job that the controller has forgotten, if the site keeps accounts."""
    fields = ("State", "ExitCode", "Elapsed", "NodeList", "End")
    try:
        shown = _run(
            "sacct", "--noheader", "--parsable2", "--allocations", f"--format={','.join(fields)}", f"--jobs={job}"
        )
    except (QueueError, ConfigError):
        shown = ""
    lines = shown.splitlines()
    if not lines:
        return JobStatus("", is_waiting=False, is_over=True, details={})
    state, code, elapsed, nodes, end = lines[-1].split("|")
    # "CANCELLED by 1000"
    word = state.partition(" ")[0]
    details = {"nodes": nodes, "ran for": elapsed, "ended": end, "exit code": code}
    return JobStatus(word, is_waiting=word in _WAITING, is_over=word not in _ACTIVE, details=details)


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
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise QueueError(
            f"{program} did not answer within {_TIMEOUT_S:.0f} s. Is the Slurm controller reachable?"
        ) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise QueueError(f"{program} failed with exit code {done.returncode}: {words}")
    return done.stdout
