"""`rl submit`: runs as jobs of a queue."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rl_launch.cli.failure import reported
from rl_launch.cli.options import AsJson, argument, keys, named, option, write_json

app = typer.Typer(no_args_is_help=True)

Recipe = Annotated[str, named("RECIPE|FILE.yaml|RUN", "Name of a recipe, a YAML file, or a run directory to resume.")]
Overrides = Annotated[
    list[str] | None,
    keys("Config keys of the run, such as run_dir=DIR, and of the profile, such as slurm.partition=gpu."),
]
Profile = Annotated[
    str, option("--profile", "Settings of the site: ~/.config/rl/NAME.yaml (default: submit).", "NAME|FILE.yaml")
]
DryRun = Annotated[bool, option("--dry-run", "Check the config, print the job's file, and submit nothing.")]
Serve = Annotated[
    bool,
    option("--serve", "Serve the recipe to programs of the tinker client (rl serve tinker) instead of training it."),
]
Output = Annotated[Path | None, option("--output -o", "Write the job's file to FILE, and submit nothing.", "FILE")]
Run = Annotated[Path, argument("RUN", "Run directory of a submitted run.")]


@app.command()
def slurm(
    recipe: Recipe,
    overrides: Overrides = None,
    serve: Serve = False,
    profile: Profile = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Submit a training run to Slurm, which continues it in further attempts until it is finished.

    The job starts Ray on its nodes and rl train on the first. The run saves and ends before the time limit, and if the
    job is preempted, and resumes when the job runs again. Set run_dir to a folder that all nodes see.
    """
    _submit("slurm", recipe, overrides or (), profile, dry_run, output, serves=serve)


@app.command()
def kubernetes(
    recipe: Recipe,
    overrides: Overrides = None,
    serve: Serve = False,
    profile: Profile = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Submit a training run to Kubernetes as a RayJob of KubeRay, which continues it in a new cluster if one is lost.

    The run directory is on a volume of the cluster. The run_dir of this machine records the job, and receives its logs.
    """
    _submit("kubernetes", recipe, overrides or (), profile, dry_run, output, serves=serve)


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """Show the state of a submitted run: its job in the queue, and how far the run has come.

    With --json: {"schema": 1, "target", "submitted", "jobs": {ID: {"state", "is_waiting", "is_over", "details": {NAME:
    TEXT}}}, "run"}.
    """
    with reported():
        from rl_launch.commands.submit import status_of

        submission, jobs, progress = status_of(run.expanduser().absolute())
        if as_json:
            of_jobs = {job: asdict(each) for job, each in jobs.items()}
            submitted = {"target": submission.target, "submitted": submission.at}
            write_json({"schema": 1, **submitted, "jobs": of_jobs, "run": progress})
            return
        for job, each in jobs.items():
            details = ", ".join(f"{name} {value}" for name, value in each.details.items())
            state = each.state or f"unknown to {submission.target}; it is over"
            sys.stdout.write(f"job {job}: {state}{f' ({details})' if details else ''}\n")
        sys.stdout.write(f"run: {progress or 'nothing in this folder yet'}\n")


@app.command()
def logs(
    run: Run,
    attempt: Annotated[int, option("--attempt", "Number of the attempt, from 0; -1 is the last.", "N")] = -1,
    follows: Annotated[
        bool, option("--follow -f", "Print further lines, of later attempts too, until the job is over.")
    ] = False,
) -> None:
    """Print the driver's log of an attempt. RUN/jobs has the logs of all attempts, and Ray's logs of each node."""
    with reported():
        from rl_launch.commands.submit import log_lines

        for line in log_lines(run.expanduser().absolute(), attempt=attempt, follows=follows):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


@app.command()
def cancel(
    run: Run, now: Annotated[bool, option("--now", "End the job at once, without another checkpoint.")] = False
) -> None:
    """End the job of a run, which saves after its step and is not continued. rl submit with the same RUN resumes it."""
    with reported():
        from rl_launch.commands.submit import cancel as end

        for line in end(run.expanduser().absolute(), at_once=now):
            sys.stdout.write(f"{line}\n")


@app.command()
def attach(
    run: Run, node: Annotated[str, option("--node", "A node of the job (default: the first).", "NAME")] = ""
) -> None:
    """Open a shell in the running job of a run, from which ray status and rl stacks reach its Ray."""
    with reported():
        from rl_launch.commands.submit import attach_command

        command = attach_command(run.expanduser().absolute(), node)
        os.execvp(command[0], list(command))


@app.command()
def profile(
    overrides: Annotated[
        list[str] | None, argument("[KEY=VALUE]...", "Keys to set, such as slurm.partition=gpu.")
    ] = None,
    name: Profile = "",
) -> None:
    """Print every key of a profile with its value, where that was set, and its meaning.

    References to environment variables are printed as they are written.
    """
    with reported():
        from rl_launch.cli.explanation_text import settings
        from rl_launch.submit.profile import explain_profile, profiles_folder

        files, keys = explain_profile(name, overrides or ())
        read = ", ".join(map(str, files)) or f"no file; the default is {profiles_folder() / 'submit.yaml'}"
        sys.stdout.write(settings(read, keys))


def _submit(
    target: str,
    recipe: str,
    overrides: list[str] | tuple[str, ...],
    profile: str,
    dry_run: bool,
    output: Path | None,
    *,
    serves: bool,
) -> None:
    with reported():
        from rl_launch.commands.submit import plan_job, submit

        job = plan_job(target, recipe, overrides, profile=profile, serves=serves)
        for warning in job.warnings:
            sys.stderr.write(f"warning: {warning}\n")
        if output is not None:
            output.expanduser().write_text(job.text, encoding="utf-8")
            sys.stdout.write(f"{output}\n")
        elif dry_run:
            sys.stdout.write(job.text)
        else:
            submission = submit(job)
            sys.stdout.write(f"job {', '.join(submission.jobs)}\n{job.request.run_dir}\n")
