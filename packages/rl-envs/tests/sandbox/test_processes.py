"""The memory of processes is what they hold, wherever it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_envs.sandbox.confinement import first_user_id, mapped_ids
from rl_envs.sandbox.keeper import _over, _pause
from rl_envs.sandbox.processes import ProcessTable, SandboxUsage
from rl_envs.sandbox.program import Limits, Outcome

HIDDEN = """
import sys
from rl_envs.sandbox import abuses, confinement
from rl_envs.sandbox.kernel import syscalls
confinement.enter_namespaces(syscalls.CLONE_NEWNS)
syscalls.mount("proc", "/proc", "proc", 0, "hidepid=2")
abuses.become(int(sys.argv[1]))
with abuses.opened(["namespaces"]) as (sandbox,), abuses.bait() as given:
    if sandbox is None:
        sys.exit(3)
    for abuse in abuses.ABUSES:
        if abuse.name in ("the memory of many processes", "the memory of processes that hide"):
            print(abuses.attempt(abuse, sandbox, given) or "contained")
"""
STATUS = b"""Name:	python
VmSize:	  900000 kB
VmRSS:	     700 kB
RssAnon:	       1 kB
RssFile:	     500 kB
RssShmem:	      20 kB
VmPTE:	     300 kB
VmSwap:	    4000 kB
HugetlbPages:	   50000 kB
Threads:	2
"""
ENDED = b"Name:	python\nState:	Z (zombie)\nThreads:	2\n"


@pytest.mark.parametrize("first", [STATUS, ENDED, b""])
def test_memory_is_read_from_any_thread_that_lives(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"7/task/7/status": first, "7/task/8/status": STATUS}
    table = ProcessTable()
    monkeypatch.setattr(table, "_read", files.__getitem__)
    assert table._memory(7, ["7", "8"]) == 54321 * 1024


@pytest.mark.parametrize(
    ("usage", "ending"),
    [
        (SandboxUsage(2**30, 20, 1000), None),
        (SandboxUsage(2**30 + 1, 1, 0), "memory"),
        (SandboxUsage(0, 1, 1001), "memory"),
        (SandboxUsage(0, 21, 0), "processes"),
    ],
)
def test_a_program_ends_beyond_each_of_its_limits(usage: SandboxUsage, ending: str | None) -> None:
    limits = Limits(memory_mib=1024, processes=16)
    assert _over(usage, limits) == ending
    if ending == "processes":
        assert Outcome("processes").describe(limits) == "it had more than 16 processes and threads"


@pytest.mark.parametrize(("mib", "tasks", "pause"), [(1020, 1, 0.02), (0, 8, 0.02), (1020, 8, 0.002)])
def test_several_processes_close_to_the_limit_are_looked_at_more_often(
    mib: int, tasks: int, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert _pause(SandboxUsage(mib * 2**20, tasks, 0), Limits(memory_mib=1024)) == pause


def test_memory_is_counted_on_a_machine_that_hides_processes_of_others() -> None:
    if os.getuid() != 0:
        pytest.skip("only root may mount such a /proc")
    uid = first_user_id(os.getpid(), mapped_ids())
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, str(uid)], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 3 or "PermissionError" in done.stderr:
        pytest.skip(f"this machine does not offer it: {done.stderr}")
    assert done.stdout.split() == ["contained", "contained"], done.stderr
