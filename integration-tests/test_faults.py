"""What a run lives through: workers that are killed, and the kill of the whole run; to the last bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

SAME = ("train/loss", "train/grad_norm", "reward/mean", "val/loss")
SFT = ("sft-arithmetic", "sft.max_num_steps=30", "sft.val_period=5", "checkpointing.save_period=4")
GRPO_STEPS = 8


@dataclass
class Run:
    """A run of `rl train` in a process group of its own."""

    process: subprocess.Popen
    folder: Path

    @classmethod
    def start(cls, folder, *arguments):
        rl = Path(sys.executable).with_name("rl")
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            command = [str(rl), "train", *arguments, f"run_dir={folder}"]
            return cls(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True), folder
            )

    @property
    def output(self):
        return (self.folder.parent / f"{self.folder.name}.log").read_text()

    def finish(self, timeout=840):
        code = self.process.wait(timeout)
        assert code == 0, self.output

    def await_step(self, step, timeout=400):
        """Wait until that many steps are in the metrics."""
        deadline = time.monotonic() + timeout
        while len(steps_of(self.folder)) < step:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def processes(self):
        """Everything it has started, this process included."""
        driver = psutil.Process(self.process.pid)
        return [driver, *driver.children(recursive=True)]

    def kill_all(self):
        """As an out-of-memory killer or a lost machine would; returns what there was."""
        found = self.processes()
        for each in found:
            each.kill()
        self.process.wait(60)
        return found


def lines_of(folder):
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps_of(folder):
    return [line for line in lines_of(folder) if line["step"] > 0]


def figures(folder):
    """What must not depend on what a run lived through, by step."""
    return {line["step"]: {name: line[name] for name in SAME if name in line} for line in lines_of(folder)}


def rolled_out(folder):
    """Prompts and completions of every step, in order."""
    found = {}
    for path in (folder / "rollouts").glob("step_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.stem] = [(row["prompt_id"], row["turns"]) for row in rows]
    return found


def shared_memory():
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module")
def grpo(warm_model):
    return (
        "grpo-arithmetic",
        f"policy.model_name={warm_model}",
        f"grpo.max_num_steps={GRPO_STEPS}",
        "grpo.val_period=0",
        "checkpointing.metric_name=null",
        "checkpointing.save_period=3",
    )


@pytest.fixture(scope="module")
def whole_sft(tmp_path_factory):
    run = Run.start(tmp_path_factory.mktemp("whole") / "sft", *SFT)
    run.finish()
    return run.folder


@pytest.fixture(scope="module")
def whole_grpo(tmp_path_factory, grpo):
    run = Run.start(tmp_path_factory.mktemp("whole") / "grpo", *grpo)
    run.finish()
    return run.folder


def killed_and_resumed(folder, num_kills, arguments, num_steps):
    """Start a run, kill all of it as often at random moments, resuming it each time, and let the last one end."""
    seed = random.randrange(2**32)
    sys.stdout.write(f"kills were drawn with seed {seed}\n")
    chance = random.Random(seed)
    for step in sorted(chance.randint(1, num_steps - 1) for _ in range(num_kills)):
        before = shared_memory()
        run = Run.start(folder, *arguments)
        run.await_step(step)
        time.sleep(chance.uniform(0, 2))
        _, alive = psutil.wait_procs(run.kill_all(), 30)
        assert not alive
        assert shared_memory() <= before
    Run.start(folder, *arguments).finish()


def test_a_killed_sft_run_resumes_to_the_last_bit(num_kills, whole_sft, tmp_path):
    killed_and_resumed(tmp_path / "run", num_kills, SFT, 30)
    assert figures(tmp_path / "run") == figures(whole_sft)


def test_a_killed_grpo_run_resumes_to_the_last_bit_and_repeats_no_prompt(num_kills, grpo, whole_grpo, tmp_path):
    killed_and_resumed(tmp_path / "run", num_kills, grpo, GRPO_STEPS)
    assert figures(tmp_path / "run") == figures(whole_grpo)
    assert rolled_out(tmp_path / "run") == rolled_out(whole_grpo)
    prompts = [prompt for rows in rolled_out(tmp_path / "run").values() for prompt in {row[0] for row in rows}]
    assert len(prompts) == len(set(prompts))


def test_a_signal_to_the_whole_group_saves_and_ends_cleanly(whole_sft, tmp_path):
    run = Run.start(tmp_path / "run", *SFT)
    run.await_step(6)
    found = run.processes()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.finish(120)
    saved = [int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert max(saved) == len(steps_of(tmp_path / "run")) < 30
    _, alive = psutil.wait_procs(found, 30)
    assert not alive
    Run.start(tmp_path / "run", *SFT).finish()
    assert figures(tmp_path / "run") == figures(whole_sft)


def test_a_killed_model_worker_restores_the_run(whole_sft, tmp_path):
    run = Run.start(tmp_path / "run", *SFT)
    run.await_step(10)
    one_of(run, "ray::WorkerHost").kill()
    run.finish()
    assert figures(tmp_path / "run") == figures(whole_sft)
    log = (tmp_path / "run" / "logs" / "driver.log").read_text()
    assert log.count("starting again from checkpoint step_8") == 1


def test_killed_rollout_workers_engines_and_environments_cost_no_prompt(grpo, whole_grpo, tmp_path):
    run = Run.start(tmp_path / "run", *grpo)
    run.await_step(1)
    one_of(run, "VLLM::EngineCore").kill()
    run.await_step(3)
    one_of(run, "environment_process").kill()
    run.await_step(4)
    one_of(run, "ray::RestartingHost").kill()
    run.await_step(5)
    one_of(run, "ray::AsyncWorkerHost").kill()
    run.finish()
    assert figures(tmp_path / "run") == figures(whole_grpo)
    assert rolled_out(tmp_path / "run") == rolled_out(whole_grpo)
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log"))
    assert logs.count("restarting it") == 2
    assert "environment process restarts" in logs
    assert "environment math: the process died and was started again" in logs


def one_of(run, words):
    """A process of the run by what its command line says."""
    found = [each for each in run.processes() if words in " ".join([each.name(), *each.cmdline()])]
    assert found, [" ".join(each.cmdline())[:80] for each in run.processes()]
    return found[0]
