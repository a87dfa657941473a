"""A driver whose main thread can do nothing more ends in bounded time, with the reason and an exit code."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from rl_core.errors import RLError
from rl_launch.cluster.ray_nodes import GCS, KEEPER, RAYLET, LocalRay, state_of
from rl_launch.placement.bundles import DevicesLost
from rl_launch.run_session.stop import StopRequest
from rl_launch.runtime import driver_watch
from rl_launch.runtime.driver_watch import DriverWatch


class Run:
    """A session that writes how it was abandoned."""

    def __init__(self, report):
        self._report, self.stop = report, StopRequest()
        self.saved, self.is_finished = 4, False

    def interrupt(self, reason):
        self.stop.ask(reason)

    def is_ending(self, num_signals):
        return self.stop.is_ending(num_signals)

    def abandon(self, error):
        self._report.write_text(json.dumps([type(error).__name__, str(error)]))


class Cluster:
    """Processes in the place of Ray's, two of which this process started."""

    def __init__(self):
        self.is_given_up = False
        self.children = {name: subprocess.Popen(["sleep", "60"]) for name in (KEEPER, GCS, RAYLET)}

    def local_ray(self):
        found = LocalRay({})
        found.is_given_up = lambda: self.is_given_up
        found.processes = {name: psutil.Process(child.pid) for name, child in self.children.items()}
        return found

    def kill(self):
        for child in self.children.values():
            child.kill()


def ended(tmp_path, work):
    """Call a function with a watch, its run and its cluster in another process, whose main thread then hears nothing.

    Returns:
        The exit code, and the report of the run.
    """
    report = tmp_path / "report"
    pid = os.fork()
    if pid == 0:
        try:
            run, cluster = Run(report), Cluster()
            run.stop.listen(gracefully=False)
            with DriverWatch(run) as watch:
                watch.watch(cluster)
                work(SimpleNamespace(watch=watch, run=run, cluster=cluster))
            os._exit(0 if not run.stop.reason else 3)
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), json.loads(report.read_text()) if report.exists() else None


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name in ("FROZEN_S", "WITHOUT_GCS_S", "UNWIND_S", "SILENT_CLOSE_S", "_REPORT_S", "_NODE_POLL_S"):
        monkeypatch.setattr(driver_watch, name, 0.2)
    monkeypatch.setattr(driver_watch, "CLOSE_S", 600.0)
    monkeypatch.setattr(driver_watch, "_POLL_S", 0.05)


def deaf(seconds=60.0):
    """Wait as a call of a library does that lets no signal through: Python's handlers run in the main thread only."""
    waiting = threading.Thread(target=time.sleep, args=(seconds,))
    waiting.start()
    while waiting.is_alive():
        try:
            waiting.join()
        except BaseException:  # noqa: BLE001 - what the handlers of signals raise
            continue


@pytest.mark.parametrize(
    ("victim", "sign", "said"),
    [
        (RAYLET, signal.SIGKILL, "node process (raylet), process"),
        (KEEPER, signal.SIGKILL, "parent of Ray's processes (node_keeper), process"),
        (RAYLET, signal.SIGSTOP, "was stopped for 0.2 s"),
        (GCS, signal.SIGKILL, "ended, and the step under way did not"),
    ],
)
def test_a_driver_without_its_ray_says_so_and_can_be_resumed(tmp_path, victim, sign, said):
    def work(given):
        given.cluster.children[victim].send_signal(sign)
        deaf()

    code, (kind, message) = ended(tmp_path, work)
    assert (code, kind) == (os.EX_TEMPFAIL, DevicesLost.__name__)
    assert said in message
    assert message.endswith("The same command resumes the run from checkpoint step_4.")


def test_a_driver_whose_node_ray_has_given_up_ends(tmp_path):
    def work(given):
        given.cluster.is_given_up = True
        deaf()

    code, (kind, message) = ended(tmp_path, work)
    assert (code, kind) == (os.EX_TEMPFAIL, DevicesLost.__name__)
    assert "given up the driver's node" in message


def test_a_run_without_its_control_service_ends_after_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_watch, "WITHOUT_GCS_S", 600.0)

    def work(given):
        given.cluster.children[GCS].kill()
        while not given.run.stop.reason:
            time.sleep(0.05)

    assert ended(tmp_path, work) == (3, None)


def test_processes_that_are_stopped_for_a_moment_and_those_that_nothing_needs_end_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_watch, "FROZEN_S", 600.0)

    def work(given):
        for child in given.cluster.children.values():
            child.send_signal(signal.SIGSTOP)
        time.sleep(0.5)

    assert ended(tmp_path, work) == (0, None)


@pytest.mark.parametrize("is_in_a_step", [False, True])
def test_a_signal_that_the_main_thread_does_not_hear_ends_the_run(tmp_path, is_in_a_step):
    def work(given):
        given.run.stop.listen(gracefully=is_in_a_step)
        os.kill(os.getpid(), signal.SIGTERM)
        if is_in_a_step:
            # the first is heard, and the run ends after the step, which never ends
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
        deaf()

    def quietly(given):
        try:
            work(given)
        except SystemExit:
            deaf()

    code, (kind, _) = ended(tmp_path, quietly)
    assert (code, kind) == (os.EX_TEMPFAIL, "SystemExit")


def test_a_start_that_passes_its_bound_ends_with_its_error(tmp_path):
    def work(given):
        with given.watch.bounded(0.2, RLError("Ray did not answer")):
            deaf()

    assert ended(tmp_path, work) == (1, ["RLError", "Ray did not answer"])


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize(("is_finished", "code"), [(True, 0), (False, os.EX_TEMPFAIL)])
def test_the_end_of_a_run_does_not_wait_for_a_process_that_answers_nothing(tmp_path, is_finished, code, sign):
    def work(given):
        given.run.is_finished = is_finished
        given.cluster.children[GCS].send_signal(sign)
        given.watch.begin_close(None, None, None)
        deaf()

    assert ended(tmp_path, work) == (code, ["NoneType", "None"])


def test_a_muted_connection_takes_what_is_written_and_never_breaks():
    ours, theirs = socket.socketpair()
    found = LocalRay({})
    found.connections = [ours.fileno()]
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send(b"x")
    found.mute()
    assert ours.send(b"x") == 1
    ours.close()


def test_a_process_that_is_not_collected_has_ended():
    child = subprocess.Popen(["true"])
    process = psutil.Process(child.pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert state_of(process) == psutil.STATUS_DEAD
    child.wait()
    assert state_of(process) == psutil.STATUS_DEAD
