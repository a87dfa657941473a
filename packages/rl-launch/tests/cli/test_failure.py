"""Commands whose reader is gone, as in `rl env list | head`."""

import subprocess

import pytest
import typer
from rl_process import RL

from rl_launch.cli.failure import reported

# click itself ends `--version` with 1, and rich the tables
QUIET = {0, 1, 141}


def without_reader(folder, *command):
    """Exit code and standard error of a command whose output nobody reads."""
    process = subprocess.Popen(
        [*RL, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
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


def test_a_broken_pipe_to_a_worker_is_a_failure(capsys):
    with pytest.raises(typer.Exit) as ended, reported():
        raise BrokenPipeError("worker")
    assert ended.value.exit_code == 1
    assert "BrokenPipeError: worker" in capsys.readouterr().err
