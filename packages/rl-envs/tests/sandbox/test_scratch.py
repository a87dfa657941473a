"""Folders of programs are removed with whatever is in them, and those of killed processes when a sandbox starts."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from rl_envs.sandbox.program import Isolation, Program
from rl_envs.sandbox.sandbox import Sandbox, SandboxFailed, SandboxUnavailable
from rl_envs.sandbox.scratch import abandoned, sweep, temporary_folder

Found = TypeVar("Found")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this process, which other tests do not share."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def _deep(folder: str) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d" * 100, dir_fd=here)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def _closed(folder: str) -> None:
    for mode in (0o700, 0o500, 0o300, 0):
        os.makedirs(f"{folder}/{mode}/inner/most")
        Path(f"{folder}/{mode}/inner/file").touch(0)
        for path in ("inner/most", "inner", ""):
            os.chmod(f"{folder}/{mode}/{path}", mode)


def _named(folder: str) -> None:
    for name in (b"\xff\xfe", b"a\nb", b"-rf", b"0", b"1", b"files", b"x" * 255):
        os.makedirs(os.path.join(os.fsencode(folder), name, name))
        os.mkfifo(os.path.join(os.fsencode(folder), name, b"pipe"))


@pytest.mark.parametrize("fill", [_deep, _closed, _named])
def test_a_folder_is_removed_whatever_is_in_it(fill: Callable[[str], None], temporary: Path) -> None:
    with temporary_folder(os.getuid()) as folder:
        fill(folder)
    assert os.listdir(temporary) == []


def test_what_links_point_to_stays(temporary: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "below").mkdir(parents=True)
    kept.chmod(0o750)
    with temporary_folder(os.getuid()) as folder:
        os.symlink(kept, f"{folder}/link")
        os.symlink(kept / "below", f"{folder}/files")
    assert os.listdir(temporary) == []
    assert (kept / "below").is_dir()
    assert kept.stat().st_mode & 0o777 == 0o750


def test_only_folders_of_killed_processes_are_swept(temporary: Path) -> None:
    for name in ("rl-scratch", "others-rl-scratch-1"):
        (temporary / name).mkdir()
    (temporary / "rl-scratch-link").symlink_to(temporary / "others-rl-scratch-1")
    pid = os.fork()
    if pid == 0:
        with temporary_folder(os.getuid()) as folder:
            Path(folder, "file").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with temporary_folder(os.getuid()) as folder:
        Path(folder, "file").touch()
        (left,) = abandoned()
        assert Path(left) != Path(folder).parent
        sweep()
        assert abandoned() == set()
        assert os.listdir(folder) == ["file"]
    assert sorted(os.listdir(temporary)) == ["others-rl-scratch-1", "rl-scratch", "rl-scratch-link"]


def test_a_folder_that_cannot_be_removed_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: object, **_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, temporary_folder(os.getuid()) as folder:
        patch.setattr(os, "rmdir", refuse)
        parent = str(Path(folder).parent)
    monkeypatch.undo()
    assert f"the sandbox's folder {parent} could not be removed: [Errno 5]" in caplog.text


@pytest.mark.parametrize("isolation", ["landlock", "limits"])
def test_a_program_and_its_folder_go_when_its_keeper_is_killed(isolation: Isolation) -> None:
    try:
        opened = Sandbox(isolation)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    source = "import ctypes, time\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nopen('file', 'w').close()\ntime.sleep(60)"
    with opened, ThreadPoolExecutor(1) as pool:
        running = pool.submit(opened.run, Program(source))
        zygote = opened._zygote
        assert zygote is not None
        keeper, first, program = _wait_until(lambda: _chain(zygote.pid))
        folder = os.readlink(f"/proc/{program}/cwd")
        os.kill(keeper, signal.SIGKILL)
        with pytest.raises(SandboxFailed, match="ended while it ran a program"):
            running.result()
        if isolation == "limits":  # whose programs may forbid their end
            os.kill(program, signal.SIGKILL)
        _wait_until(lambda: not os.path.exists(folder) and not any(map(_lives, (first, program))))


def _chain(zygote: int) -> list[int]:
    """Return the processes of a program that has made its file, its keeper first; empty if there is none yet."""
    chain = [zygote]
    with contextlib.suppress(OSError):  # one of the sandbox's own programs ended
        for _ in range(3):
            chain += map(int, Path(f"/proc/{chain[-1]}/task/{chain[-1]}/children").read_text().split()[-1:])
    return chain[1:] if os.path.exists(f"/proc/{chain[-1]}/cwd/file") else []


def _lives(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _wait_until(find: Callable[[], Found]) -> Found:
    deadline = time.monotonic() + 60
    while not (found := find()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found
