"""`rl submit`: runs as jobs of a queue."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_algos import hub
from rl_core.config import as_written, refusal
from rl_core.devices import CUDA, device_named
from rl_core.errors import ConfigError, ConfigProblems, RLError, RunDirectoryError
from rl_launch.cluster.device import AUTO
from rl_launch.commands.preparation import check_run_dir
from rl_launch.commands.start import run_of
from rl_launch.commands.train import finished_metrics
from rl_launch.run_config.inputs import input_problems
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.served import served_folder, served_plan
from rl_launch.run_session.directory.row_files import JOBS
from rl_launch.run_session.directory.run_folder import RunFolder, is_run
from rl_launch.run_session.directory.writable import make_folder
from rl_launch.submit.profile import TARGETS, belongs_to_profile, refused, settings_of
from rl_launch.submit.target import (
    SERVE,
    TRAIN,
    JobRequest,
    JobStatus,
    QueueTarget,
    Submission,
    newest_submission,
    record_submission,
    submission_of,
)

_POLL_S = 1.0
DRIVER_LOG = "driver.log"


class PlannedJob(NamedTuple):
    """A job that is checked and not submitted yet.

    Args:
        target: Queue that it is for.
        plan: Plan of the run.
        request: The run, as the target takes it.
        text: The file that describes the job.
        warnings: What may go wrong on the nodes, as sentences.
    """

    target: QueueTarget
    plan: RunPlan
    request: JobRequest[Any]
    text: str
    warnings: tuple[str, ...]


def plan_job(
    target: str, recipe: str, overrides: Sequence[str], *, profile: str = "", serves: bool = False
) -> PlannedJob:
    """Check a run as `rl train`, or `rl serve tinker`, does before it starts anything, and render its job.

    Args:
        target: Name of the target.
        recipe: A recipe's name, a YAML file, or a run directory.
        overrides: Keys of the run, and keys of the profile that begin with the name of a target.
        profile: Name or path of the profile; empty for the default one.
        serves: True for a job that serves the recipe instead of training it.

    Raises:
        ConfigError: If the run or the profile has problems.
        RunDirectoryError: If the run directory cannot be used, or holds a finished run.
    """
    of_profile = [each for each in overrides if belongs_to_profile(each)]
    for each in of_profile:
        if not each.startswith(f"{target}."):
            raise ConfigError(f"{each}: rl submit {target} takes keys of {target} only. Remove it")
    settings = settings_of(target, profile, of_profile)
    own = [each for each in overrides if not belongs_to_profile(each)]
    plan, run_dir = _served(recipe, own) if serves else _trained(recipe, own)
    cluster = plan.config.cluster
    # the machine that submits the job need not have its device
    device = CUDA if cluster.device == AUTO else device_named(cluster.device)
    path = Path(recipe).expanduser()
    source = str(path.absolute()) if path.exists() else recipe
    # the config of a run holds every key, also those that an earlier job has set
    given_keys, resumes = {each.partition("=")[0] for each in own}, is_run(path)
    request = JobRequest(
        name=run_dir.name,
        run_dir=run_dir,
        command=SERVE if serves else TRAIN,
        recipe=source,
        overrides=tuple(each for each in own if not each.startswith("run_dir=")),
        is_written=lambda key: key in given_keys or (not resumes and plan.resolved.raw.is_written(key)),
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node if device.has_gpus else 0,
        device=device,
        settings=settings,
        config=plan.config,
        tree=plan.without_unused(as_written(plan.root)),
    )
    shared = TARGETS[target].shared_variables(request)
    warnings = (*TARGETS[target].warnings(request), *(() if shared is None else _absent_inputs(plan, recipe, shared)))
    try:
        return PlannedJob(TARGETS[target], plan, request, TARGETS[target].render(request), warnings)
    except ConfigProblems as error:
        raise refused(error.problems, target, profile, of_profile) from None


def _trained(recipe: str, overrides: Sequence[str]) -> tuple[RunPlan, Path]:
    """Return the plan of a run that trains, and its folder."""
    given = run_of(recipe, overrides)
    plan, run_dir = given.plan, given.run_dir.absolute()
    if not plan.plugin.trains:
        raise ConfigError(f"algorithm: {plan.plugin.name} does not train. Only training runs can be submitted")
    check_run_dir(run_dir, plan, fresh=False)
    if finished_metrics(run_dir, plan) is not None:
        raise RunDirectoryError(
            f"{run_dir} holds a finished run. Increase its number of steps, or choose another run_dir."
        )
    return plan, run_dir


def _served(recipe: str, overrides: Sequence[str]) -> tuple[RunPlan, Path]:
    """Return the plan of a run that serves programs, and its folder."""
    plan = served_plan(recipe, overrides)
    return plan, served_folder(plan, recipe).absolute()


def submit(job: PlannedJob) -> Submission:
    """Submit a planned job, and record that in the run directory, which is made.

    Raises:
        RunDirectoryError: If a job of the same run is in the queue.
        RLError: If the queue refuses the job.
    """
    run_dir = job.request.run_dir
    earlier = newest_submission(run_dir)
    for id, status in states_of(earlier).items() if earlier is not None else ():
        if not status.is_over:
            raise RunDirectoryError(
                f"{run_dir} is submitted as job {id} already ({status.state}). Wait for it, or end it with "
                f"rl submit cancel {run_dir}."
            )
    made = next((folder for folder in (run_dir, job.request.jobs) if not folder.exists()), None)
    make_folder(run_dir, job.plan.config.logger.run_dir_access)
    job.request.jobs.mkdir(exist_ok=True)
    file = job.request.jobs / job.target.file_name
    file.write_text(job.text, encoding="utf-8")
    try:
        jobs = job.target.submit(file, job.request)
    except RLError:
        if made is not None:
            shutil.rmtree(made)
        raise
    return record_submission(run_dir, job.target.name, jobs)


def status_of(run_dir: Path) -> tuple[Submission, dict[str, JobStatus], str]:
    """Return the last submission of a run, the states of its jobs by id (see `states_of`), and how far the run has
    come; empty before its first start.

    Raises:
        RunDirectoryError: If it was never submitted.
    """
    submission = submission_of(run_dir)
    run = ""
    if is_run(run_dir):
        state = RunFolder(run_dir).state()
        reason = f" ({state.reason})" if state.reason else ""
        run = f"{state.status} at step {state.step}{f' of {state.max_steps}' if state.max_steps else ''}{reason}"
    return submission, states_of(submission), run


def states_of(submission: Submission) -> dict[str, JobStatus]:
    """Return the states of the jobs of a submission that are not over, or of the last one if all are."""
    states = {job: TARGETS[submission.target].status(job) for job in submission.jobs}
    alive = {job: status for job, status in states.items() if not status.is_over}
    return alive or dict(list(states.items())[-1:])


def cancel(run_dir: Path, *, at_once: bool) -> Iterator[str]:
    """End the jobs of a run; yields what happens to each, as a sentence.

    Args:
        run_dir: The run directory.
        at_once: True to end them without another checkpoint.

    Raises:
        RunDirectoryError: If the run was never submitted.
    """
    submission = submission_of(run_dir)
    # the last one first, so that none of them takes the place of one that ends
    for job in reversed(list(states_of(submission))):
        yield TARGETS[submission.target].cancel(job, at_once=at_once)


def log_lines(run_dir: Path, *, attempt: int = -1, follows: bool = False) -> Iterator[str]:
    """Yield the lines of the driver's log of one attempt.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt, from 0; a negative number counts from the last.
        follows: True to yield further lines, of later attempts too, until the jobs are over.

    Raises:
        RunDirectoryError: If there is no such attempt.
    """
    submission = submission_of(run_dir)
    target = TARGETS[submission.target]
    attempts = target.attempts(run_dir / JOBS)
    path = _numbered(run_dir, attempts, attempt) / DRIVER_LOG
    read = 0
    while True:
        # both are asked before the file is read, so that its last lines are not missed
        is_over = not follows or all(status.is_over for status in states_of(submission).values())
        later = attempts[attempts.index(path.parent) + 1 :] if follows else ()
        if path.is_file():
            with path.open("rb") as file:
                file.seek(read)
                whole, _, _ = file.read().rpartition(b"\n")
            read += len(whole) + bool(whole)
            yield from whole.decode(errors="replace").splitlines()
        if later:
            path, read = later[0] / DRIVER_LOG, 0
        elif is_over:
            return
        else:
            time.sleep(_POLL_S)
        attempts = target.attempts(run_dir / JOBS)


def attach_command(run_dir: Path, node: str = "") -> Sequence[str]:
    """Return the command that opens a shell in the running job of a run.

    Raises:
        RunDirectoryError: If no job of the run is running.
    """
    submission = submission_of(run_dir)
    states = states_of(submission)
    if not any(not status.is_over and not status.is_waiting for status in states.values()):
        shown = ", ".join(f"job {job} is {status.state or 'over'}" for job, status in states.items())
        raise RunDirectoryError(f"no job of {run_dir} is running: {shown}.")
    target = TARGETS[submission.target]
    return target.attach(_numbered(run_dir, target.attempts(run_dir / JOBS), -1), node)


def _numbered(run_dir: Path, attempts: Sequence[Path], number: int) -> Path:
    try:
        return attempts[number]
    except IndexError:
        known = f"it has attempts 0 to {len(attempts) - 1}" if attempts else "no job of it has started yet"
        raise RunDirectoryError(f"{run_dir} has no attempt {number}: {known}.") from None


def _absent_inputs(plan: RunPlan, recipe: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the warning that nodes without a network will not find a model or data.

    Args:
        plan: The run.
        recipe: Its name, for the remedy.
        variables: Environment variables of the job.

    Raises:
        ConfigProblems: If the job is set to offline mode.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    is_offline = hub.is_offline()
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        absent = list(input_problems(plan))
    finally:
        os.environ.clear()
        os.environ.update(before)
    if absent and is_offline:
        raise refusal(absent, plan.resolved.raw)
    if absent:
        keys = ", ".join(problem.key for problem in absent)
        yield (
            f"{keys}: not found on this machine, so nodes without a network will not find it. "
            f"HF_HUB_OFFLINE=1 rl doctor {recipe} shows what to download"
        )
