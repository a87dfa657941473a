"""Ports that a worker keeps for itself until its ranks meet there."""

import errno
import logging
import os
import queue
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rl_core.devices.device import hold_port
from rl_core.ray import host
from rl_core.ray.host import bound_size, log_to


def test_nobody_else_gets_a_port_that_is_held():
    with hold_port() as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use") as refused:
            other.bind(("", held.getsockname()[1]))
        assert refused.value.errno == errno.EADDRINUSE


def test_listeners_that_ranks_meet_at_open_on_a_port_that_is_held():
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)):
            pass
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timedelta(seconds=5))
        store.set("met", "yes")
        assert store.get("met") == b"yes"


@pytest.fixture
def loggers():
    """Levels and handlers as they were before."""
    root, ours = logging.getLogger(), logging.getLogger("rl_core")
    before = list(root.handlers), root.level, ours.level
    root.setLevel(logging.WARNING)
    yield
    root.handlers[:], root.level, level = before
    ours.setLevel(level)


def test_a_workers_log_holds_the_projects_infos_and_everybodys_warnings(tmp_path, loggers):
    log_to(str(tmp_path / "worker.log"))
    for name in ("rl_core.torch.training.worker", "somebody.else"):
        logging.getLogger(name).debug("a detail")
        logging.getLogger(name).info("an info")
        logging.getLogger(name).warning("a warning")
    lines = [line.split(" ", 2)[2] for line in (tmp_path / "worker.log").read_text().splitlines()]
    assert lines == [
        "INFO rl_core.torch.training.worker: an info",
        "WARNING rl_core.torch.training.worker: a warning",
        "WARNING somebody.else: a warning",
    ]


# sizes of the log and of the limit, and whether the log starts over
SIZES = {
    "at the limit": (100, 100, False),
    "above": (101, 100, True),
    "empty": (0, 0, False),
    "no file": (None, 0, False),
}


@pytest.mark.parametrize("case", SIZES)
def test_a_log_above_its_limit_starts_over_and_the_last_one_is_kept(tmp_path, case):
    size, limit, starts_over = SIZES[case]
    log, last = tmp_path / "worker.log", tmp_path / "worker.log.1"
    if size is not None:
        log.write_text("x" * size)
        last.write_text("earlier")
    bound_size(str(log), limit)
    if starts_over:
        assert (log.read_text(), last.read_text()) == ("", "x" * 101)
    elif size is not None:
        assert (log.read_text(), last.read_text()) == ("x" * size, "earlier")
    assert {path.name for path in tmp_path.iterdir()} <= {"worker.log", "worker.log.1"}


def test_descriptors_of_a_log_that_starts_over_write_to_its_start(tmp_path):
    log = tmp_path / "worker.log"
    held = [os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(2)]
    for fd in held:
        os.write(fd, b"before\n")
    bound_size(str(log), 1)
    for fd in held:
        os.write(fd, b"after\n")
        os.close(fd)
    assert log.read_text() == "after\nafter\n"
    assert (tmp_path / "worker.log.1").read_text() == "before\nbefore\n"


def test_the_size_of_a_workers_log_is_bounded_while_it_runs(tmp_path, monkeypatch):
    checked, log = queue.SimpleQueue(), tmp_path / "worker.log"

    def check(path):
        checked.put(path)
        if checked.qsize() > 1:
            raise SystemExit
        raise OSError("no space is left")

    monkeypatch.setattr(host, "CHECK_PERIOD_S", 0)
    monkeypatch.setattr(host, "bound_size", check)
    with pytest.raises(SystemExit):
        host._keep_bounded(str(log))
    assert checked.qsize() == 2


def test_output_of_a_worker_and_of_what_it_starts_goes_to_its_log(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("before\n")
    code = "from rl_core.ray.host import redirect_output; import os, sys; redirect_output(sys.argv[1]);"
    code += "sys.stderr.write('mine\\n'); os.system('echo of a child'); os.abort()"
    found = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, timeout=120, check=False)
    assert log.read_text().splitlines()[:3] == ["before", "mine", "of a child"]
    assert found.stdout == found.stderr == b""
