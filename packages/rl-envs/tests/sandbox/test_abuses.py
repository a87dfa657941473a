"""Programs that abuse a sandbox are contained, and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_envs.sandbox.abuses import ABUSES, Abuse, bait
from rl_envs.sandbox.program import Isolation, Program
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable

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
@pytest.mark.parametrize("isolation", ["namespaces", "landlock"])
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
    assert abuse.breaches(sandbox.run(abuse.program(given), abuse.limits)) == ""
    assert sandbox.run(Program("import os; print(len(os.listdir()))")).stdout == b"0\n"


def test_there_are_forty_abuses_of_different_kinds() -> None:
    assert len({abuse.name for abuse in ABUSES}) == len(ABUSES) >= 40


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


def test_scratch_folders_are_removed(given: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _open("limits", tmp_path) as sandbox:
        folder = (
            sandbox.run(Program("import os; open('left', 'w').close(); print(os.getcwd())")).stdout.decode().strip()
        )
    assert folder
    assert not os.path.exists(folder)


def _processes_of(folder: Path) -> list[str]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
