"""A machine shared with others: another user's Ray, a cluster that has ended, packages that cannot be downloaded."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from logical_cluster import START_ATTEMPTS
from runs import Run, family, figures, steps_of

from rl_core.testing.exhaustive import exhaustive
from rl_launch.cli.failure import UNFINISHED

NOWHERE = "http://127.0.0.1:9"
"""A proxy that refuses every connection."""


@dataclass
class OthersRay:
    """Ray as another user of the machine started it."""

    address: str
    processes: list[psutil.Process]
    folder: Path

    def is_whole(self):
        """Whether every process of it is alive."""
        return all(process.is_running() for process in self.processes)

    def was_used(self):
        """Whether a worker was ever started on it."""
        return any((self.folder / "session_latest" / "logs").glob("worker-*"))


@pytest.fixture(scope="module")
def others_ray(tmp_path_factory):
    """Another user's Ray, on Ray's default ports."""
    folder = Path(tempfile.mkdtemp(prefix="others-ray-"))  # as short as Ray's sockets need it
    log = tmp_path_factory.mktemp("others") / "ray.log"
    ray = str(Path(sys.executable).with_name("ray"))
    options = ["--port=6379", "--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats", "--block"]
    command = [ray, "start", "--head", f"--temp-dir={folder}", *options]
    for _ in range(START_ATTEMPTS):
        with log.open("w") as output:
            started = subprocess.Popen(command, stdout=output, stderr=output)
        while "Ray runtime started" not in log.read_text() and started.poll() is None:
            time.sleep(0.2)
        if started.poll() is None:
            break
    try:
        assert started.poll() is None, log.read_text()
        processes = psutil.Process(started.pid).children(recursive=True)
        yield OthersRay("127.0.0.1:6379", processes, folder)
    finally:
        left = family(psutil.Process(started.pid))
        started.send_signal(signal.SIGTERM)
        for process in psutil.wait_procs(left, 20)[1]:
            process.kill()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


@exhaustive
def test_a_run_beside_somebody_elses_ray_keeps_to_itself_unless_it_is_sent_there(others_ray, sft, whole_sft, tmp_path):
    # a signal to its whole group, as a terminal or Slurm sends it, saves and ends a run and no other's processes
    run = Run.start(tmp_path / "run", *sft)
    run.await_step(2)
    found = run.processes()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(code=UNFINISHED)
    _, alive = psutil.wait_procs(found, 60)
    assert not alive
    (saved,) = (run.folder / "checkpoints").glob("step_*")
    done = len(steps_of(run.folder))
    assert saved.name == f"step_{done}"
    assert done < 30
    assert others_ray.is_whole()
    assert not others_ray.was_used()

    sent = {"RAY_ADDRESS": others_ray.address, "RAY_AUTH_MODE": "token"}
    Run.start(run.folder, *sft, f"sft.max_num_steps={done + 2}", **sent).finish()
    assert others_ray.is_whole()
    assert others_ray.was_used()
    assert len(steps_of(run.folder)) == done + 2
    assert figures(run.folder) == figures(whole_sft, until=done + 2)


def test_a_cluster_that_is_gone_is_named(rl, tmp_path):
    result = rl("train", "sft-arithmetic", f"run_dir={tmp_path / 'run'}", RAY_ADDRESS="127.0.0.1:9")
    assert result.code == 2
    (message, remedy) = result.output.splitlines()[-2:]
    assert message == "error: RAY_ADDRESS is 127.0.0.1:9, but no Ray cluster answers there"
    assert "unset RAY_ADDRESS" in remedy
    assert not (tmp_path / "run").exists()


def test_a_worker_environment_that_cannot_be_built_ends_the_command_with_one_message(rl, tmp_path):
    out_of_reach = {
        **dict.fromkeys(["ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "http_proxy", "https_proxy"], NOWHERE),
        **dict.fromkeys(["NO_PROXY", "no_proxy"], ""),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_HTTP_RETRIES": "0",
        "RL_HOME": str(tmp_path / "home"),
    }
    arguments = ["sft-arithmetic", "cluster.worker_envs=isolated", f"run_dir={tmp_path / 'run'}"]
    result = rl("train", *arguments, **out_of_reach)
    assert result.code == 2
    _, _, message = result.output.partition("\nerror: ")
    assert message.startswith("environment rl-dtensor.worker failed after ")
    assert "Failed to fetch" in message
    assert "Check the network and the disk" in message.splitlines()[-1]
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
    assert [path for path in (tmp_path / "home" / "envs").iterdir() if path.is_dir()] == []
    commands = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]
