"""The scripts of a job's pods, with a command that ends as the driver does in place of `rl train`."""

import os
import signal
import subprocess
import time
from importlib.resources import files

import pytest

UNFINISHED = 75
SCRIPTS = files("rl_launch.submit.kubernetes")
DRIVER = """
trap 'echo saved; exit 75' TERM
echo started
touch "$RL_RUN_DIR/started"
while :; do sleep 0.1; done
"""
"""A driver that saves and ends when it gets SIGTERM."""


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


class Job:
    """A job on a head whose `ray job stop` writes down that it was called, and stops the job."""

    def __init__(self, folder):
        self.run = folder / "run"
        self.run.mkdir()
        (folder / "bin").mkdir()
        ray = folder / "bin" / "ray"
        ray.write_text(f'#!/bin/bash\necho "$*" >> {folder}/ray.log\nkill -TERM $(ps -o ppid= $$)\n')
        ray.chmod(0o755)
        self.calls = folder / "ray.log"
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "RL_RUN_DIR": str(self.run),
            "RL_JOB": "rl-run",
            "RAY_CLUSTER_NAME": "rl-run-abcde",
            "RL_MAX_ATTEMPTS_WITHOUT_CHECKPOINT": "2",
        }

    def start(self, script, *command):
        path = str(SCRIPTS / script)
        return subprocess.Popen(["bash", path, *command], env=self.environment, stdout=subprocess.PIPE, text=True)

    def train(self, code):
        process = self.start("run.sh", "bash", "-c", code)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    @property
    def stopped(self):
        return self.calls.read_text().splitlines() if self.calls.is_file() else []

    def await_file(self, path):
        while not path.exists():
            time.sleep(0.05)


def test_a_finished_run_is_a_job_that_succeeded(job):
    code, output = job.train("exit 0")
    assert code == 0
    assert output.splitlines()[-1].endswith("finished")
    assert not job.stopped


def test_a_run_that_failed_is_a_stopped_job_which_kuberay_does_not_try_again(job):
    code, output = job.train("echo no such key; exit 2")
    assert code == 1
    assert "the driver has failed with exit code 2" in output
    assert job.stopped == ["job stop --no-wait --address http://127.0.0.1:8265 rl-run"]
    assert (job.run / "jobs" / "rl-run.0" / "driver.log").read_text() == "no such key\n"


def test_a_server_is_tried_again_as_long_as_its_programs_step(job):
    (job.run / "tenants.jsonl").write_text("")
    for _ in range(4):
        assert job.train(f"echo 1 >> {job.run}/tenants.jsonl; exit 75")[0] == UNFINISHED
    assert job.train("exit 75")[0] == UNFINISHED
    assert job.train("exit 75")[0] == 1
    assert len(job.stopped) == 1


def test_an_unfinished_run_is_tried_again_as_long_as_it_leaves_checkpoints(job):
    checkpoints = job.run / "checkpoints"
    assert job.train(f"mkdir -p {checkpoints}/step_9; exit 75")[0] == UNFINISHED
    assert job.train(f"mkdir -p {checkpoints}/step_10; exit 75")[0] == UNFINISHED
    assert job.train("exit 75")[0] == UNFINISHED
    assert not job.stopped
    code, output = job.train("exit 75")
    assert "2 attempts in a row have left no new checkpoint" in output
    assert (code, len(job.stopped)) == (1, 1)
    assert sorted(path.name for path in (job.run / "jobs").iterdir() if path.is_dir()) == [
        f"rl-run.{n}" for n in range(4)
    ]


def test_a_pod_that_is_about_to_end_waits_for_the_run_to_save(job):
    process = job.start("run.sh", "bash", "-c", DRIVER)
    job.await_file(job.run / "started")
    pods = [job.start("stop.sh") for _ in range(2)]
    assert [pod.wait(60) for pod in pods] == [0, 0]
    assert process.wait(60) == UNFINISHED
    assert (job.run / "jobs" / "rl-run.0" / "driver.log").read_text() == "started\nsaved\n"
    assert not [path for path in (job.run / "jobs").iterdir() if path.suffix in (".running", ".stop")]


def test_a_pod_ends_at_once_if_no_run_is_in_progress(job):
    (job.run / "jobs").mkdir()
    assert job.start("stop.sh").wait(30) == 0
    assert not list((job.run / "jobs").iterdir())


def test_a_stopped_job_tells_the_driver_once_although_its_pods_are_ended_as_well(job):
    told = "trap 'echo told' TERM; touch $RL_RUN_DIR/started; for _ in {1..30}; do sleep 0.1; done; exit 75"
    process = job.start("run.sh", "bash", "-c", told)
    job.await_file(job.run / "started")
    (driver,) = subprocess.check_output(["pgrep", "--parent", str(process.pid), "--full", "trap"], text=True).split()
    for pid in (process.pid, int(driver)):  # as Ray does
        os.kill(pid, signal.SIGTERM)
    assert job.start("stop.sh").wait(60) == 0
    assert process.wait(60) == UNFINISHED
    assert (job.run / "jobs" / "rl-run.0" / "driver.log").read_text() == "told\n"
