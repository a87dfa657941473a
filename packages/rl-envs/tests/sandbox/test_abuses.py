"""Programs that abuse a sandbox are contained, and leave nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from rl_envs.sandbox.abuses import ABUSES, BREACHED, CONTAINED, NAME_WIDTH, NOT_OFFERED, USER, Abuse, attempt, bait
from rl_envs.sandbox.confinement import first_user_id, mapped_ids
from rl_envs.sandbox.program import Isolation, Limits, Program
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable

ISOLATIONS: list[Isolation] = ["namespaces", "landlock"]
NOT_BY_LANDLOCK = {"fill the disk by many files", "make files without end"}
"""Abuses that the level `landlock` does not contain, as its table says."""
BY_LIMITS = {"a memory bomb", "flood stdout", "open descriptors without end", "an endless loop", "sleep without end"}
"""Some that even `limits` contains."""


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Any]]:
    with bait() as found:
        yield found


def _open(isolation: Isolation, folder: Path) -> Sandbox:
    try:
        # the folder tells its processes from those of others
        return Sandbox(isolation, python_path=[str(folder)])
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Isolation, Sandbox]]:
    opened: dict[Isolation, Sandbox] = {}
    yield opened
    for sandbox in opened.values():
        sandbox.close()


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.name.replace(" ", "-"))
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_abuse_is_contained_and_the_next_program_runs(
    isolation: Isolation,
    abuse: Abuse,
    given: Mapping[str, Any],
    sandboxes: dict[Isolation, Sandbox],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if isolation == "landlock" and abuse.name in NOT_BY_LANDLOCK:
        pytest.skip("landlock does not limit the size of the scratch folder")
    if isolation not in sandboxes:
        sandboxes[isolation] = _open(isolation, tmp_path_factory.mktemp(isolation))
    sandbox = sandboxes[isolation]
    assert attempt(abuse, sandbox, given) == ""
    assert sandbox.run(Program("import os; print(len(os.listdir()))")).stdout == b"0\n"


@pytest.fixture(scope="module")
def unprivileged() -> dict[str, list[str]]:
    """Results by abuse of the levels in order, as a user without privileges whose programs share its user id."""
    if os.getuid() != 0:
        pytest.skip("the other tests run as such a user")
    uid = first_user_id(os.getpid(), mapped_ids())
    command = [sys.executable, "-m", "rl_envs.sandbox.abuses", *ISOLATIONS, "--uid", str(uid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "PermissionError" in done.stderr:
        pytest.skip(f"root may not become another user here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    title, _, *rows = done.stdout.splitlines()
    assert title == f"sandboxes and victims of user {uid}"
    results = {row[:NAME_WIDTH].strip(): re.split(r"\s{2,}", row[NAME_WIDTH:].strip()) for row in rows}
    assert all(user in (f"{uid}, ours", NOT_OFFERED) for user in results[USER])
    return results


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.name.replace(" ", "-"))
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_abuse_by_a_program_of_the_victims_user_is_contained(
    isolation: Isolation, abuse: Abuse, unprivileged: Mapping[str, list[str]]
) -> None:
    result = unprivileged[abuse.name][ISOLATIONS.index(isolation)]
    if result == NOT_OFFERED:
        pytest.skip("this machine does not offer the level to users without privileges")
    assert result == (BREACHED if isolation == "landlock" and abuse.name in NOT_BY_LANDLOCK else CONTAINED)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_programs_that_may_not_choose_processors_still_compute(isolation: Isolation) -> None:
    packages = str(Path(numpy.__file__).parents[1])
    source = """
import ctypes, os, threading
os.environ.update(OMP_PROC_BIND="true", OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2")
import numpy
try:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
except PermissionError:
    pass
mask = (ctypes.c_uint64 * 16)(1)
bound = ctypes.CDLL(None).pthread_setaffinity_np(ctypes.c_void_p(threading.get_ident()), 128, mask)
assert bound in (0, 1, 22), bound  # done, not permitted, or no such processor here
print(int((numpy.ones((200, 200)) @ numpy.ones((200, 200))).sum()))
"""
    with _open(isolation, Path(packages)) as sandbox:
        outcome = sandbox.run(Program(source), Limits(cpu_s=60.0, wall_s=120.0, memory_mib=4096))
    assert outcome.stdout == b"8000000\n", outcome


def test_there_are_ninety_abuses_of_different_kinds() -> None:
    assert len({abuse.name for abuse in ABUSES}) == len(ABUSES) >= 90
    assert all(len(abuse.name) <= NAME_WIDTH for abuse in ABUSES)


@pytest.mark.parametrize("isolation", ["namespaces", "landlock", "limits"])
def test_no_process_outlives_its_program(isolation: Isolation, given: Mapping[str, Any], tmp_path: Path) -> None:
    leftovers = [abuse for abuse in ABUSES if abuse.name.startswith(("leave a process", "hold its output"))]
    assert len(leftovers) == 2
    with _open(isolation, tmp_path) as sandbox:
        for abuse in leftovers:
            outcome = sandbox.run(abuse.program(given), abuse.limits)
            assert abuse.breaches(outcome) == ""
            # the keeper answers when all are gone, and ends a moment later
            assert len(_processes_of(tmp_path)) <= 1 + len(leftovers)
    assert _processes_of(tmp_path) == []


def test_limits_contain_accidents(given: Mapping[str, Any], tmp_path: Path) -> None:
    with _open("limits", tmp_path) as sandbox:
        for abuse in ABUSES:
            if abuse.name in BY_LIMITS:
                assert abuse.breaches(sandbox.run(abuse.program(given), abuse.limits)) == "", abuse.name


def _processes_of(folder: Path) -> list[str]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
