"""One process at a time in a folder, also on file systems without locks."""

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys

import psutil
import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.run_session.directory import lock
from rl_launch.run_session.directory.lock import DirectoryLock, holder

HOST = socket.gethostname()
NOW = "2999-01-01T00:00:00+00:00"


def identity(pid, host=HOST, **changed):
    """What a process of this machine with a number has written, if it was this process; with other values."""
    return json.dumps({**json.loads(lock._identity()), "pid": pid, "host": host, "since": NOW, **changed})


def of_an_earlier_version(pid):
    return json.dumps({"pid": pid, "host": HOST, "since": NOW})


@pytest.fixture
def dead():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture(params=[None, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def file_system(request, monkeypatch):
    """A file system with locks, and ones without."""

    def refused(file, operation):
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(fcntl, "flock", refused)


@pytest.mark.usefixtures("file_system")
def test_the_second_of_two_is_refused_with_the_process_of_the_first_until_that_releases(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()} on {re.escape(HOST)} since "):
            second.acquire()
        second.release()
    assert f"process {os.getpid()} on {HOST}" in (holder(tmp_path) or "")
    first.release()
    assert holder(tmp_path) is None
    second.acquire()
    second.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock"]


OTHER_BOOT = ["5f5d9b3a-0000-0000-0000-000000000000", "pid:[4026531836]", "time:[4026531834]"]
HELD = "in use by process {} on "

# what a holder has left where there are no locks, and the words of the refusal; None if it is taken over
LEFT = {
    "dead": (lambda dead: identity(dead), None),
    "number of another process": (lambda dead: identity(os.getpid(), started=1), None),
    "alive": (lambda dead: identity(os.getpid()), HELD.format(os.getpid())),
    "on another host": (lambda dead: identity(dead, "elsewhere"), f"process .* on elsewhere since {re.escape(NOW)}"),
    "before a start of the machine, or on another of its name": (
        lambda dead: identity(dead, seen_from=OTHER_BOOT),
        HELD.format(r"\d+"),
    ),
    "in another container": (
        lambda dead: identity(dead, seen_from=[*lock._surroundings()[:1], "pid:[1]", "time:[1]"]),
        HELD.format(r"\d+"),
    ),
    "surroundings that could not be read": (lambda dead: identity(dead, seen_from=None), HELD.format(r"\d+")),
    "dead, of an earlier version": (of_an_earlier_version, HELD.format(r"\d+")),
    "cut short": (lambda dead: '{"pid": 1', "in use by another process"),
    "of another form": (lambda dead: "[1]", "in use by another process"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_without_locks_a_process_of_this_host_that_has_ended_is_replaced(tmp_path, dead, monkeypatch, case):
    def refused(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    left, words = LEFT[case]
    claim, written = tmp_path / "run.lock.claim", left(dead)
    claim.write_text(written)
    taken = DirectoryLock(tmp_path)
    if words is None:
        taken.acquire()
        assert json.loads(claim.read_text())["pid"] == os.getpid()
        taken.release()
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
        return
    with pytest.raises(RunDirectoryError, match=f"{words}.*if that process has ended, remove {re.escape(str(claim))}"):
        taken.acquire()
    assert claim.read_text() == written


@pytest.mark.parametrize("left", ["", "[1]", '{"pid": 1', '{"pid": 1}', identity(1, "elsewhere")])
def test_what_another_has_written_into_a_lock_that_nobody_holds_does_not_count(tmp_path, left):
    (tmp_path / "run.lock").write_text(left)
    assert holder(tmp_path) is None
    taken = DirectoryLock(tmp_path)
    taken.acquire()
    taken.release()


@pytest.mark.usefixtures("file_system")
def test_a_change_of_the_clock_moves_no_holder(tmp_path, monkeypatch):
    held = DirectoryLock(tmp_path)
    held.acquire()
    # psutil derives the time at which a process was started from the clock
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 4e9)
    assert f"process {os.getpid()} on {HOST}" in (holder(tmp_path) or "")
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(tmp_path).acquire()
    held.release()


@pytest.mark.parametrize("kind", ["hidden", "of another user", "of a foreign proc"])
def test_a_process_that_cannot_be_seen_is_not_called_dead(tmp_path, monkeypatch, kind):
    (tmp_path / "run.lock.claim").write_text(identity(os.getpid()))
    monkeypatch.setattr(fcntl, "flock", raises(OSError(errno.ENOLCK, "")))
    match kind:
        case "hidden":
            started = lock._started
            monkeypatch.setattr(lock, "_started", lambda pid: None if pid == os.getpid() else started(pid))
        case "of another user":
            monkeypatch.setattr(os, "kill", raises(PermissionError(errno.EPERM, "")))
        case "of a foreign proc":
            monkeypatch.setattr(lock, "_surroundings", lambda: None)
    with pytest.raises(RunDirectoryError, match="in use by process"):
        DirectoryLock(tmp_path).acquire()


def test_a_process_that_has_ended_and_was_not_waited_for_is_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", raises(OSError(errno.ENOLCK, "")))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claim = tmp_path / "run.lock.claim"
    claim.write_text(identity(process.pid, started=lock._started(process.pid)))
    with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid}"):
        DirectoryLock(tmp_path).acquire()
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    DirectoryLock(tmp_path).acquire()
    process.wait()


def test_without_links_a_claim_is_made_in_two_steps(tmp_path, monkeypatch, dead):
    monkeypatch.setattr(fcntl, "flock", raises(OSError(errno.ENOLCK, "")))
    monkeypatch.setattr(os, "link", raises(PermissionError(errno.EPERM, "")))
    (tmp_path / "run.lock.claim").write_text(identity(dead))
    first = DirectoryLock(tmp_path)
    first.acquire()
    with pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(tmp_path).acquire()
    first.release()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


def raises(error):
    def refused(*args):
        raise error

    return refused


STARTERS = """
import errno, fcntl, multiprocessing, os, sys
from pathlib import Path
from rl_core.errors import RunDirectoryError
from rl_launch.run_session.directory.lock import DirectoryLock

def refused(file, operation):
    raise OSError(errno.ENOLCK, "")

def start(barrier, folders, held):
    for number, folder in enumerate(folders):
        lock = DirectoryLock(folder)
        barrier.wait(60)
        try:
            lock.acquire()
        except RunDirectoryError:
            pass
        else:
            with held.get_lock():
                held[number] += 1
        # nobody releases before all have tried
        barrier.wait(60)
        lock.release()

fcntl.flock = refused
context = multiprocessing.get_context("fork")
folders = sorted(Path(sys.argv[1]).iterdir())
barrier, held = context.Barrier(6), context.Array("i", len(folders))
children = [context.Process(target=start, args=(barrier, folders, held)) for _ in range(6)]
for child in children:
    child.start()
for child in children:
    child.join()
sys.stdout.write(" ".join(map(str, held)))
"""


def test_of_several_that_find_the_claim_of_a_dead_process_one_holds(tmp_path, dead):
    for number in range(300):
        folder = tmp_path / f"{number:03}"
        folder.mkdir()
        (folder / "run.lock.claim").write_text(identity(dead))
    found = subprocess.run([sys.executable, "-c", STARTERS, str(tmp_path)], capture_output=True, text=True, check=True)
    held = found.stdout.split()
    assert len(held) == 300
    assert set(held) == {"1"}
    assert {path.name for folder in tmp_path.iterdir() for path in folder.iterdir()} == {"run.lock"}
