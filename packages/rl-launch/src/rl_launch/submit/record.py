"""The jobs that a run was submitted as: a line for each submission in the run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rl_core.errors import RunDirectoryError
from rl_launch.session.directory.row_files import JOBS

_FILE = "submissions.jsonl"


@dataclass(frozen=True)
class Submission:
    """One submission of a run.

    Args:
        target: Name of the target.
        jobs: Ids of its jobs, which run one after another.
        at: Time of the submission, in ISO format with the time zone.
    """

    target: str
    jobs: tuple[str, ...]
    at: str

    @classmethod
    def now(cls, target: str, jobs: tuple[str, ...]) -> Submission:
        """Return a submission made at this time."""
        return cls(target, jobs, datetime.now().astimezone().isoformat(timespec="seconds"))

    def write(self, run_dir: Path) -> None:
        """Add it to those of a run."""
        with (run_dir / JOBS / _FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def newest_submission(run_dir: Path) -> Submission | None:
    """Return the last submission of a run; None if it was never submitted."""
    try:
        lines = (run_dir / JOBS / _FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    data = json.loads(lines[-1])
    return Submission(data["target"], tuple(data["jobs"]), data["at"])


def submission_of(run_dir: Path) -> Submission:
    """Return the last submission of a run.

    Raises:
        RunDirectoryError: If it was never submitted.
    """
    if (found := newest_submission(run_dir)) is None:
        raise RunDirectoryError(
            f"{run_dir} was not submitted. Use rl submit slurm or rl submit kubernetes with run_dir={run_dir}."
        )
    return found
