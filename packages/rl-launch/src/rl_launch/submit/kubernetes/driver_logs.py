"""Logs of drivers, copied from the volume of a cluster to this machine."""

from __future__ import annotations

import shlex
from pathlib import Path, PurePosixPath

from rl_launch.submit.kubernetes.kubectl import Job, read, run

_LOGS = ("driver.log", "job.log")
_LIST = f'cd "$RL_RUN_DIR/jobs" && stat --format="%s %n" "$RL_JOB".*/{{{",".join(_LOGS)}}} 2> /dev/null || true'


def fetch_logs(job: Job, folder: Path) -> None:
    """Add to the logs in a folder what the head of a job has more of; none if the head is not running.

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
        # the names come from a volume that others write to
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
