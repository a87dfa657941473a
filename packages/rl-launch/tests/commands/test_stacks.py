"""`rl stacks` on real processes: a driver, a worker that holds the interpreter's lock, and its child."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_core.errors import RunDirectoryError
from rl_core.testing.exhaustive import exhaustive
from rl_core.tracing.spans import machine_clock
from rl_launch.cli import app
from rl_launch.commands import stacks
from rl_launch.commands.stacks import ask_nodes, stacks_of
from rl_launch.run_session.directory.lock import DirectoryLock

WORKER = """
import ctypes, os, subprocess, sys
from pathlib import Path
from rl_core.tracing.stacks import write_stacks_of

def waits_for_ever():
    print(child.pid, flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # of the worker"])
write_stacks_of("policy-0", Path(sys.argv[1]))
waits_for_ever()
"""


@pytest.fixture
def run(tmp_path):
    """The directory of a run in progress, whose driver is this process."""
    (tmp_path / "run.json").write_text('{"algorithm": "sft", "model": "m"}')
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    yield tmp_path
    lock.release()


@pytest.fixture
def worker(run):
    """A process that nobody can call."""
    folder = run / "logs" / "stacks"
    with subprocess.Popen([sys.executable, "-c", WORKER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        process.child = int(process.stdout.readline())
        while "State:\tS" not in Path(f"/proc/{process.pid}/status").read_text():
            assert process.poll() is None
        yield process
        os.kill(process.child, 9)
        process.kill()


@pytest.fixture(autouse=True)
def _without_py_spy(monkeypatch):
    monkeypatch.setattr(stacks, "py_spy_program", lambda: None)


def test_a_worker_that_holds_the_lock_is_shown_with_its_state_and_its_child(run, worker):
    found = stacks_of(run)
    first, second = found.processes
    assert (first.name, first.pid, first.host) == ("policy-0", worker.pid, socket.gethostname())
    assert "waits_for_ever" in first.text
    assert first.state.startswith("waiting")
    assert (second.name, second.pid) == ("policy-0, child", worker.child)
    assert "# of the worker" in second.text
    # asked again, it shows the stacks of now only
    assert stacks_of(run).processes[0].text.count("waits_for_ever") == 1


def test_the_command_prints_text_or_json(run, worker):
    result = CliRunner().invoke(app, ["stacks", str(run)])
    assert result.exit_code == 0, result.output
    assert f"policy-0 (process {worker.pid} on {socket.gethostname()}): waiting" in result.output
    found = json.loads(CliRunner().invoke(app, ["stacks", str(run), "--json"]).output)
    assert [each["name"] for each in found["processes"]] == ["policy-0", "policy-0, child"]


@exhaustive
def test_another_node_is_asked_by_a_task_that_needs_nothing_of_this_package(run, worker, machines):
    node = machines.add()
    found = ask_nodes([node.node_id], str(run / "logs" / "stacks"))
    assert found[0].name == "policy-0"
    assert "waits_for_ever" in found[0].text


def test_processes_that_ended_or_run_elsewhere_are_named(run, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = run / "logs" / "stacks"
    folder.mkdir(parents=True)
    for name, host in (("policy-0", socket.gethostname()), ("policy-1", "other-host")):
        header = {"name": name, "pid": 2**22 + 1, "host": host, "machine": machine_clock(), "node": ""}
        (folder / f"{name}.1.stacks").write_text(json.dumps(header) + "\n")
    missing = stacks_of(run).missing
    assert "policy-0: process 4194305 has ended" in missing
    assert any("not shown: policy-1 on other-host" in each and "RAY_ADDRESS" in each for each in missing)


def test_a_process_without_a_handler_is_never_signalled(run):
    """The signal would end it."""
    folder = run / "logs" / "stacks"
    folder.mkdir(parents=True)
    path = folder / "policy-0.1.stacks"
    with path.open("a") as file, subprocess.Popen(["sleep", "60"], stdout=file) as process:
        header = {"name": "policy-0", "pid": process.pid, "host": socket.gethostname(), "machine": "", "node": ""}
        path.write_text(json.dumps(header) + "\n")
        (found,) = stacks_of(run).processes
        assert process.poll() is None
        process.kill()
    assert found.text.startswith("It wrote no stacks")


def test_a_run_that_is_not_in_progress_is_refused(run, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "other-host")
    with pytest.raises(RunDirectoryError, match="Run rl stacks on that machine"):
        stacks_of(run)


def test_a_run_that_has_ended_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"algorithm": "sft", "model": "m"}')
    (tmp_path / "config.yaml").write_text("algorithm: sft\n")
    with pytest.raises(RunDirectoryError, match="is not running"):
        stacks_of(tmp_path)
