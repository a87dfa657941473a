"""`rl chaos` on real processes: ranks of a run whose driver is this process, and processes that are not the run's."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli import app
from rl_launch.commands.chaos import FAULTS, FILE, RunProcess, Schedule, candidates, chaos, seconds_of
from rl_launch.run_session.directory.exactly_once import prove
from rl_launch.run_session.directory.lock import DirectoryLock
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.directory.run_state import RunState

WORKER = """
import sys, time
from pathlib import Path
from rl_core.tracing.stacks import write_stacks_of
write_stacks_of(sys.argv[2], Path(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    """The directory of a rehearsal in progress, whose driver is this process."""
    (tmp_path / "run.json").write_text('{"algorithm": "sft", "model": "m"}')
    (tmp_path / "config.yaml").write_text("algorithm: sft\ncluster: {device: rehearsal}\n")
    RunState("running", step=3).write(tmp_path)
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    yield tmp_path
    lock.release()


@pytest.fixture
def start(run):
    """Starts a worker of the run by its name."""
    started = []

    def start_one(name):
        command = [sys.executable, "-c", WORKER, str(run / "logs" / "stacks"), name]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def saves(run):
    """Checkpoints of the run, one every few milliseconds."""
    is_over = threading.Event()

    def save():
        for step in itertools.count(1):
            if is_over.wait(0.02):
                return
            (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
            (run / "checkpoints" / f"step_{step}" / "manifest.json").write_text('{"files": []}')

    thread = threading.Thread(target=save)
    thread.start()
    yield
    is_over.set()
    thread.join()


def journal(run, event):
    return [row for row in map(json.loads, (run / FILE).read_text().splitlines()) if row["event"] == event]


def test_a_fault_is_done_to_a_process_of_the_run_and_to_no_other(run, start):
    rank, worker, stranger = start("policy-0"), start("rollout-worker-0"), start("policy-1")
    # The record of a process that has ended, whose number another process has.
    record = run / "logs" / "stacks" / f"policy-1.{stranger.pid}.stacks"
    header = record.read_text()
    record.unlink()
    record.write_text(header)
    assert chaos(run, Schedule(("rank",), every_s=0.1, for_s=0.4), resumes=False, is_agreed=False) == 1
    assert rank.wait(10) == -9
    assert (worker.poll(), stranger.poll()) == (None, None)
    (fault,) = journal(run, "fault")
    assert fault["processes"] == [{"name": "policy-0", "pid": rank.pid, "host": socket.gethostname()}]
    assert (fault["fault"], fault["step"], fault["number"]) == ("rank", 3, 1)


def test_a_stopped_process_continues(run, start):
    worker = start("rollout-worker-0")
    start("policy-0")
    states = []

    def watch():
        while worker.poll() is None and len(states) < 400:
            states.append(psutil.Process(worker.pid).status())
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    stops = Schedule(("stop-rollout-worker",), every_s=0.1, for_s=0.3, stopped_s=0.3)
    chaos(run, stops, resumes=False, is_agreed=False)
    thread.join()
    assert psutil.STATUS_STOPPED in states
    assert states[-1] == psutil.STATUS_SLEEPING
    assert len(journal(run, "undone")) == 1


def test_the_seed_fixes_the_faults_and_their_order(run, start, saves):
    names = ["policy-0", "policy-1", "rollout-worker-0", "environment-math"]
    done = []
    for _ in range(2):
        started = [start(name) for name in names]
        schedule = Schedule(("rank", "environment", "rollout-worker"), every_s=0.02, for_s=1.0, seed=5)
        chaos(run, schedule, resumes=False, is_agreed=False)
        found = [(row["fault"], row["processes"][0]["name"]) for row in journal(run, "fault")]
        (run / FILE).unlink()
        for process in started:
            process.kill()
            process.wait()
        done.append(found[:3])
    assert done[0] == done[1]
    assert {fault for fault, _ in done[0]} == {"rank", "environment", "rollout-worker"}


def test_a_node_is_all_that_the_run_has_there_and_never_the_nodes_of_a_cluster_of_others(monkeypatch):
    here = socket.gethostname()

    def process(name, kind, node, host=here):
        return RunProcess(name, kind, 1, host, node)

    rank, other, worker = (
        process("policy-0", "rank", "a"),
        process("policy-1", "rank", "b"),
        process("w", "engine", "b"),
    )
    raylets = [process("raylet", "raylet", "a"), process("raylet", "node", "b")]
    assert candidates("node", [rank, other, worker, *raylets]) == [[other, worker, raylets[1]]]
    assert candidates("node", [rank, other, worker]) == []
    away = process("policy-1", "rank", "b", "elsewhere")
    assert candidates("node", [rank, away]) == [[away]]
    assert candidates("stop-node", [rank, away]) == [[away]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--faults", "meteor"), "--faults meteor: there is no such fault"),
        (("--faults", "stop-disk"), "--faults stop-disk: there is no such fault"),
        (("--faults", "clock"), "the clock cannot be moved for one run"),
        (("--faults", "disk"), "is not a file system of its own"),
        (("--faults", "engine"), "the run has started no such process"),
        (("--every", "soon"), "'soon' is not a time; write it as 30s, 10m or 1h"),
    ],
)
def test_a_fault_that_cannot_be_done_is_refused_by_name(run, start, arguments, words):
    start("policy-0")
    result = CliRunner().invoke(app, ["chaos", str(run), "--every", "0s", "--for", "1s", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert not (run / FILE).exists()


def test_a_run_that_is_not_a_rehearsal_needs_a_yes_and_one_that_is_over_is_refused(run, tmp_path):
    (run / "config.yaml").write_text("algorithm: sft\n")
    result = CliRunner().invoke(app, ["chaos", str(run)])
    assert (result.exit_code, "with --yes" in result.output) == (2, True)
    (run / "config.yaml").write_text("algorithm: sft\ncheckpointing: {enabled: false}\n")
    with pytest.raises(ConfigError, match="saves no checkpoints"):
        chaos(run, Schedule(), resumes=False, is_agreed=True)
    (run / "config.yaml").write_text("algorithm: sft\n")
    (run / "run.lock").write_text("")
    result = CliRunner().invoke(app, ["chaos", str(run), "--yes"])
    assert (result.exit_code, "is not running: its status is interrupted" in result.output) == (2, True)


def test_a_run_of_another_user_is_refused(run, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: run.stat().st_uid + 1)
    with pytest.raises(ConfigError, match=r"belongs to the user \d+, .* Ask its owner"):
        chaos(run, Schedule(), resumes=False, is_agreed=True)
    assert not (run / FILE).exists()


def test_a_signal_to_the_exercise_continues_what_it_has_stopped(run, start):
    worker, before = start("rollout-worker-0"), signal.getsignal(signal.SIGTERM)

    def end():
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        chaos(run, Schedule(("stop-rollout-worker",), every_s=0.0, stopped_s=60.0), resumes=False, is_agreed=True)
    thread.join()
    assert psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk_has_room_again(tmp_path):
    from rl_launch.commands import chaos as module

    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with module._filled(folder / "ballast"), pytest.raises(OSError, match="No space left"):
            (folder / "file").write_bytes(bytes(8192))
        (folder / "file").write_bytes(bytes(8192))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


DRIVER = """
import sys, time
sys.path[:0] = sys.argv[4:]
import test_exactly_once as runs

class SlowPool(runs.LastFirstPool):
    def next_done(self):
        time.sleep(0.01)
        return super().next_done()

runs.LastFirstPool = SlowPool
runs.run(sys.argv[1], steps=int(sys.argv[2]), **eval(sys.argv[3]))
"""
"""A driver of GRPO with its real session, ledger and loop, whose rollouts and model are made up."""

SESSION = Path(__file__).parents[1] / "session"


@pytest.mark.parametrize(
    ("rule", "num_kills"),
    [
        ({"staleness": 2}, 2),
        *(
            pytest.param(rule, num_kills, marks=exhaustive)
            for rule, num_kills in (
                ({"staleness": 0}, 7),
                ({"staleness": 2}, 7),
                ({"staleness": 2, "sampler": "ready_first"}, 6),
            )
        ),
    ],
)
def test_a_driver_that_is_killed_again_and_again_trains_every_prompt_once(rule, num_kills, tmp_path, monkeypatch):
    folder, steps = tmp_path / "run", 3 * num_kills + 2
    paths = [str(SESSION / "directory"), str(SESSION)]
    command = [sys.executable, "-c", DRIVER, str(folder), str(steps), repr(rule), *paths]
    monkeypatch.setattr("rl_launch.commands.chaos.resume_command", lambda path: command)
    with subprocess.Popen(command) as first:
        while not (folder / "metrics.jsonl").exists():
            assert first.poll() is None
            time.sleep(0.05)
        schedule = Schedule(("driver",), every_s=0.02, for_s=600.0, seed=num_kills)
        assert chaos(folder, schedule, resumes=True, is_agreed=True) >= num_kills
    proof = prove(RunFolder(folder))
    assert (proof.holds, proof.gaps, proof.step) == (True, (), steps)
    assert (proof.num_trained, proof.num_compared) == (3 * steps, steps)
    assert len(journal(folder, "resume")) == len(journal(folder, "fault"))


def test_times_and_faults_have_words():
    assert [seconds_of(each) for each in ("30s", "2m", "1h", "0.5s", "7")] == [30, 120, 3600, 0.5, 7]
    assert all(FAULTS.values())
