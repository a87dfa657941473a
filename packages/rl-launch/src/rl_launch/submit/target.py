"""A queue that runs are submitted to, as a protocol: each kind of queue implements it in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rl_core.config import Config
from rl_core.devices import Device
from rl_core.errors import RunDirectoryError
from rl_launch.root_config import RunConfig
from rl_launch.run_session.directory.row_files import JOBS

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


def record_submission(run_dir: Path, target: str, jobs: tuple[str, ...]) -> Submission:
    """Add a submission made at this time to the submissions of a run, and return it."""
    submission = Submission(target, jobs, datetime.now().astimezone().isoformat(timespec="seconds"))
    with (run_dir / JOBS / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(submission)) + "\n")
    return submission


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


S = TypeVar("S", bound=Config)


TRAIN = ("rl", "train")
SERVE = ("rl", "serve", "tinker", "--resumable")
"""Commands that a job runs, before the recipe."""


@dataclass(frozen=True)
class JobRequest(Generic[S]):
    """A run that is to be a job, and the settings of the queue.

    Args:
        name: Name of the run, for people.
        run_dir: Absolute path of the run directory, which every node sees.
        recipe: Recipe of the run: its name, or the absolute path of a file or a run directory.
        overrides: Config keys that the user set, without `run_dir`.
        is_written: Returns whether the user set a key of the run's config; the others may be set by the target.
        num_nodes: Number of nodes.
        gpus_per_node: GPUs to use on each node; 0 on the CPU.
        device: Kind of device of the models.
        settings: Settings of the target.
        config: Config of the run.
        tree: The config as nested plain values, which read back to the same run.
        command: Words of the command that starts or resumes the run, before the recipe.
    """

    name: str
    run_dir: Path
    recipe: str
    overrides: tuple[str, ...]
    is_written: Callable[[str], bool]
    num_nodes: int
    gpus_per_node: int
    device: Device
    settings: S
    config: RunConfig
    tree: Mapping[str, Any]
    command: tuple[str, ...] = TRAIN

    @property
    def trains(self) -> bool:
        """True if the run trains by itself; False if it serves programs that train."""
        return self.command == TRAIN

    @property
    def jobs(self) -> Path:
        """Folder of the files of the run's jobs."""
        return self.run_dir / JOBS


@dataclass(frozen=True)
class JobStatus:
    """The state of a job.

    Args:
        state: State in the queue's own words, such as `RUNNING`; empty if the queue has forgotten the job.
        is_waiting: True if the job is in the queue and does not run yet.
        is_over: True if the job has ended and will not run again.
        details: Further facts by name: nodes, time left, reason.
    """

    state: str
    is_waiting: bool
    is_over: bool
    details: Mapping[str, str]


class QueueTarget(Protocol):
    """A kind of queue. None of its methods keeps state: a job is known by its id and the folder of its run."""

    name: ClassVar[str]
    """Name of the target: its command, and the section of a profile that holds its settings."""

    settings: ClassVar[type[Config]]
    """Type of that section."""

    file_name: ClassVar[str]
    """Name of the file that `render` writes, in the folder of jobs."""

    def render(self, request: JobRequest[Any]) -> str:
        """Return the file that describes the job.

        Raises:
            ConfigProblems: If the settings do not go with the run.
        """

    def warnings(self, request: JobRequest[Any]) -> Iterable[str]:
        """Return what may go wrong on the nodes, as sentences."""

    def shared_variables(self, request: JobRequest[Any]) -> Mapping[str, str] | None:
        """Return the environment variables of a job that reads the files of this machine; None if it reads others."""

    def submit(self, file: Path, request: JobRequest[Any]) -> tuple[str, ...]:
        """Submit a rendered file; returns the ids of the jobs, which run one after another.

        Raises:
            RLError: If the queue refuses it, with its message.
        """

    def status(self, job: str) -> JobStatus:
        """Return the state of a job."""

    def cancel(self, job: str, *, at_once: bool) -> str:
        """End a job that does not continue; returns what happens, as a sentence.

        Args:
            job: Id of the job.
            at_once: True to end it without another checkpoint.
        """

    def attempts(self, jobs: Path) -> Sequence[Path]:
        """Return the log folders of all attempts at a run, the oldest first; each has `driver.log`.

        Args:
            jobs: Folder of the run's jobs.
        """

    def attach(self, attempt: Path, node: str) -> Sequence[str]:
        """Return the command that opens a shell in the job of an attempt that is running.

        Args:
            attempt: Log folder of the attempt.
            node: Name of the node; empty for the first.
        """
