"""Stacks of a process on a signal, also while native code holds the interpreter's lock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_core.tracing.stacks import PREFIX_VARIABLE, SIGNAL, stop_writing_stacks, write_stacks_of, write_stacks_of_child

HOLDS_THE_LOCK = """
import ctypes, os, sys
from pathlib import Path
from rl_core.tracing.stacks import write_stacks_of

def stuck_in_native_code():
    print("ready", flush=True)
    # of PyDLL, which keeps the lock during the call
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

write_stacks_of("worker", Path(sys.argv[1]))
stuck_in_native_code()
"""


def lines_until(path: Path, text: str, process: subprocess.Popen) -> str:
    while text not in (content := path.read_text()):
        assert process.poll() is None, content
    return content


def test_a_process_that_holds_the_interpreters_lock_is_shown(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        path = tmp_path / f"worker.{process.pid}.stacks"
        while "State:\tS" not in Path(f"/proc/{process.pid}/status").read_text():
            assert process.poll() is None
        os.kill(process.pid, SIGNAL)
        content = lines_until(path, "in <module>", process)
        process.kill()
    assert "stuck_in_native_code" in content


@pytest.fixture
def variable(monkeypatch):
    monkeypatch.delenv(PREFIX_VARIABLE, raising=False)
    return monkeypatch


def test_a_child_writes_next_to_its_worker_under_its_name(tmp_path, variable):
    path = write_stacks_of("policy-0", tmp_path)
    assert path.name == f"policy-0.{os.getpid()}.stacks"
    write_stacks_of_child("engine-rank-0")
    assert (tmp_path / f"policy-0.engine-rank-0.{os.getpid()}.stacks").is_file()
    stop_writing_stacks(path)
    assert not path.exists()
    assert PREFIX_VARIABLE not in os.environ


def test_outside_a_run_a_child_writes_nothing_and_a_file_that_cannot_be_written_is_no_failure(tmp_path, variable):
    write_stacks_of_child("process")
    (tmp_path / "file").write_text("")
    variable.setenv(PREFIX_VARIABLE, str(tmp_path / "file" / "policy-0"))
    write_stacks_of_child("process")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
