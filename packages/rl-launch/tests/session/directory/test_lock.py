"""One process at a time in a folder, also on file systems without locks."""

import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys

import pytest

from rl_core.errors import RunDirectoryError
from rl_launch.session.directory.lock import DirectoryLock, holder

HOST = socket.gethostname()
NOW, LONG_AGO = "2999-01-01T00:00:00+00:00", "2001-01-01T00:00:00+00:00"


def identity(pid, host=HOST, since=NOW):
    return json.dumps({"pid": pid, "host": host, "since": since})


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


# what a holder has left where there are no locks, and the words of the refusal; None if it is taken over
LEFT = {
    "dead": (lambda dead: identity(dead), None),
    "number of another process": (lambda dead: identity(os.getpid(), since=LONG_AGO), None),
    "alive": (lambda dead: identity(os.getpid()), f"in use by process {os.getpid()} on "),
    "on another host": (lambda dead: identity(dead, "elsewhere"), f"process .* on elsewhere since {re.escape(NOW)}"),
    "cut short": (lambda dead: '{"pid": 1', "in use by another process"),
    "of another form": (lambda dead: "[1]", "in use by another process"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_without_locks_a_process_of_this_host_that_has_ended_is_replaced(tmp_path, dead, monkeypatch, case):
    def refused(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    left, words = LEFT[case]
    claim = tmp_path / "run.lock.claim"
    claim.write_text(left(dead))
    lock = DirectoryLock(tmp_path)
    if words is None:
        lock.acquire()
        assert json.loads(claim.read_text())["pid"] == os.getpid()
        lock.release()
        assert not claim.exists()
        return
    with pytest.raises(RunDirectoryError, match=f"{words}.*if that process has ended, remove {re.escape(str(claim))}"):
        lock.acquire()
    assert claim.read_text() == left(dead)


@pytest.mark.parametrize("left", ["", "[1]", '{"pid": 1', '{"pid": 1}', identity(1, "elsewhere")])
def test_what_another_has_written_into_a_lock_that_nobody_holds_does_not_count(tmp_path, left):
    (tmp_path / "run.lock").write_text(left)
    assert holder(tmp_path) is None
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()
