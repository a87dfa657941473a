"""The score of a working copy, by the tests of its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_envs.repository.task import RepositoryTask
from rl_envs.repository.working_copy import overlaid, texts
from rl_envs.sandbox import tree
from rl_envs.sandbox.cancellation import Cancellation
from rl_envs.sandbox.program import Limits, Outcome, Program
from rl_envs.sandbox.sandbox import Runner
from rl_envs.sandbox.tree import Entry

FOLDER = "repository"
"""Folder of the working copy in the scratch folder of a sandbox."""


@dataclass(frozen=True)
class Score:
    """How many of a row's test commands succeed.

    Args:
        num_passed, num_tests: commands that succeed, and all.
        problem: How the first that fails ended; empty if none does.
    """

    num_passed: int
    num_tests: int
    problem: str = ""


def score(
    files: Sequence[Entry],
    task: RepositoryTask,
    runner: Runner,
    limits: Limits,
    cancellation: Cancellation,
    *,
    stop_early: bool,
) -> Score:
    """Run each test command in a sandbox of its own, without a network, on a fresh copy of the files.

    Args:
        files: The working copy, with protected files as they are in the repository.
        task: The tests.
        runner: Where they run.
        limits: Limits of each command.
        cancellation: Ends them.
        stop_early: True to leave out the commands after the first that fails.
    """
    packed = placed(overlaid(files, texts(task.test_files)))
    num_passed, problem = 0, ""
    for command in task.commands:
        outcome = runner.run(Program(command=command, tree=packed, folder=FOLDER), limits, cancellation)
        failure = _failure(outcome, command, limits)
        num_passed += not failure
        problem = problem or (failure and f"{' '.join(command)}: {failure}")
        if failure and stop_early:
            break
    return Score(num_passed, len(task.commands), problem)


def placed(files: Sequence[Entry], beside: Sequence[Entry] = ()) -> bytes:
    """An archive of a working copy in its folder, and of files beside it."""
    moved = [Entry(f"{FOLDER}/{each.path}", each.content, each.link, each.is_executable) for each in files]
    return tree.pack([Entry(FOLDER), *moved, *beside])


def is_python(command: Sequence[str]) -> bool:
    """Return whether a command runs in the interpreter of its sandbox, which tells whether it came to its end."""
    return command[0].rpartition("/")[2].startswith("python")


def _failure(outcome: Outcome, command: Sequence[str], limits: Limits) -> str:
    """How a command failed; empty if it succeeded."""
    if not outcome.ok:
        return outcome.describe(limits)
    if is_python(command) and not outcome.is_complete:
        return "a file of the repository ended it (os._exit, or sys.exit outside of its main file)"
    return ""
