"""Commands whose reader is gone, as in `rl env list | head`."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import typer
from rl_process import RL
from typer.testing import CliRunner

from rl_core.errors import ConfigError, FailureOrigin, RLError, WorkerError
from rl_core.rollouts.judging import JudgeBudgetSpent
from rl_launch.cli.app import app
from rl_launch.cli.failure import UNFINISHED, explained, reported, resumable
from rl_launch.commands import train
from rl_launch.commands.train import TrainOutcome
from rl_launch.placement.bundles import DevicesLost

# click itself ends `--version` with 1, and rich the tables
QUIET = {0, 1, 141}


def without_reader(folder, *command):
    """Exit code and standard error of a command whose output nobody reads."""
    process = subprocess.Popen([*RL, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    with process.stderr:
        process.stdout.close()
        said = process.stderr.read()
    return process.wait(60), said


@pytest.mark.parametrize(
    "command", [("data", "list"), ("env", "list"), ("recipes",), ("config", "show", "sft-tiny")], ids=" ".join
)
def test_a_command_whose_reader_is_gone_ends_like_other_tools(command, tmp_path):
    assert without_reader(tmp_path, *command) == (141, "")


@pytest.mark.parametrize("command", [("--version",), ("--help",), ("runs", ".")], ids=" ".join)
def test_tables_and_help_end_quietly_without_a_reader(command, tmp_path):
    code, said = without_reader(tmp_path, *command)
    assert code in QUIET
    assert said == ""


@pytest.mark.parametrize(
    ("error", "code"), [(DevicesLost("a node is gone"), 75), (ConfigError("wrong"), 2), (RLError("failed"), 1)]
)
def test_a_run_that_can_be_resumed_has_an_exit_code_of_its_own(error, code):
    with pytest.raises(typer.Exit) as ended, reported():
        raise error
    assert ended.value.exit_code == code


@pytest.mark.parametrize("is_taken_by_a_run", [False, True])
def test_sigterm_ends_a_command_that_can_be_resumed_with_that_exit_code(is_taken_by_a_run):
    pid = os.fork()
    if pid == 0:
        try:
            with reported(), resumable():
                if is_taken_by_a_run:
                    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
        except typer.Exit as ending:
            os._exit(ending.exit_code)
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75


@pytest.mark.parametrize(("is_finished", "code"), [(True, 0), (False, 75)])
def test_an_unfinished_run_has_the_same_exit_code(is_finished, code, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "train", lambda *_, **__: TrainOutcome({}, is_finished=is_finished))
    answer = CliRunner().invoke(app, ["train", "sft-arithmetic", f"run_dir={tmp_path / 'run'}"])
    assert answer.exit_code == code


def test_a_broken_pipe_to_a_worker_is_a_failure(capsys):
    with pytest.raises(typer.Exit) as ended, reported():
        raise BrokenPipeError("worker")
    assert ended.value.exit_code == 1
    assert "BrokenPipeError: worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        MemoryError(),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        WorkerError("RuntimeError", "can't start new thread", "", FailureOrigin("policy", 1, "here", "train_step")),
    ],
    ids=repr,
)
def test_a_limit_of_memory_or_threads_is_named(error):
    assert "limit of memory, processes or threads" in explained(error, None)


def test_a_spent_budget_of_a_judge_is_a_message_and_the_exit_code_of_a_run_to_resume(capsys):
    said = "judges.critic.limits.max_total_tokens is spent. Increase it, and run the same command again"
    with pytest.raises(typer.Exit) as ending, reported():
        raise JudgeBudgetSpent(said)
    assert ending.value.exit_code == UNFINISHED
    assert capsys.readouterr().err == f"error: {said}\n"
