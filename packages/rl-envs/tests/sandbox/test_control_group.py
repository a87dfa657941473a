"""Control groups are used where they are delegated, and hold what a program's processes have together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rl_envs.sandbox import processes
from rl_envs.sandbox.processes import ControlGroup, delegated
from rl_envs.sandbox.program import Limits

MOUNT = "30 24 0:26 {root} {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("own", "root", "uid", "is_container", "above"),
    [
        ("/user/app/run", "/", 1000, False, ["/user/app/run", "/user/app", "/user", ""]),
        ("/user/app/run", "/user", 1000, True, ["/app/run", "/app", ""]),
        ("/init", "/", 0, True, ["/init", ""]),
        ("/service", "/", 0, False, []),  # the machine's own root
        ("/elsewhere", "/container", 0, True, []),
        ("", "/", 1000, False, []),  # no cgroup v2
        ("/user", "", 1000, False, []),  # not mounted
    ],
)
def test_the_groups_above_a_process_are_those_of_its_user_or_container(
    own: str, root: str, uid: int, is_container: bool, above: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "/proc/self/cgroup": f"4:memory:/\n0::{own}\n" if own else "4:memory:/\n",
        "/proc/self/mountinfo": MOUNT.format(root=root, top=tmp_path) if root else "",
    }
    monkeypatch.setattr(processes, "_read", texts.__getitem__)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    if is_container:
        (tmp_path / "cgroup.type").touch()
    assert list(processes._groups_above()) == [f"{tmp_path}{folder}" for folder in above]


@pytest.mark.parametrize(
    ("files", "is_used"),
    [
        ({"cgroup.subtree_control": "cpu memory pids\n"}, True),
        ({"cgroup.subtree_control": "cpu pids\n"}, False),
        ({}, False),
        ({"run/memory.max": "500\n", "cgroup.subtree_control": "memory pids\n"}, False),
        ({"run/memory.max": "max\n", "cgroup.subtree_control": "memory pids\n"}, True),
    ],
)
def test_a_group_is_used_if_it_passes_its_limits_on_and_none_is_left(
    files: dict[str, str], is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(processes, "_groups_above", lambda: iter([str(tmp_path / "run"), str(tmp_path)]))
    monkeypatch.setattr(processes, "_can_be_used", lambda parent: os.fstat(parent).st_ino == tmp_path.stat().st_ino)
    found = delegated()
    assert (found is not None) == is_used
    if found is not None:
        os.close(found)


def test_a_folder_that_is_not_of_control_groups_is_not_used(tmp_path: Path) -> None:
    parent = os.open(tmp_path, os.O_RDONLY)
    assert not processes._can_be_used(parent)
    os.close(parent)


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    parent = delegated()
    if parent is None:
        pytest.skip("no control groups are delegated here")
    with closing(ControlGroup(parent, Limits(memory_mib=64, scratch_mib=1, processes=4))) as made:
        yield made
    assert not [name for name in os.listdir(parent) if name == made._name]
    os.close(parent)


def _status_of(group: ControlGroup, program: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            group.join()
            program()
        finally:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


def test_memory_is_held_by_the_kernel(group: ControlGroup) -> None:
    assert os.WEXITSTATUS(_status_of(group, lambda: bytearray(b"x") * 2**24)) == 7
    assert not group.is_exhausted()
    assert os.WTERMSIG(_status_of(group, lambda: bytearray(b"x") * 2**28)) == signal.SIGKILL
    assert group.is_exhausted()


def test_processes_are_held_by_the_kernel(group: ControlGroup) -> None:
    def fork() -> None:
        children: list[int] = []
        while len(children) < 20:
            try:
                children.append(os.fork())
            except OSError:
                break
            if children[-1] == 0:
                signal.pause()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os._exit(len(children))

    assert os.WEXITSTATUS(_status_of(group, fork)) == Limits(processes=4).max_tasks - 1
