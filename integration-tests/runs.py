"""Runs of `rl train` that tests start, watch and kill, and the contents of their folders."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from rl_algos.requirement import LOSSES
from rl_core import fork_server
from rl_core.plugins import POLICIES, plugin
from rl_launch.worker_envs.provision import provision
from rl_launch.worker_envs.spec import ROLLOUT_WORKER, worker_env

SAME = ("train/loss", "train/grad_norm", "reward/mean", "val/loss")
"""Metrics that must not depend on faults and interruptions of a run."""

NUM_PROMPTS = 8
"""Of a step of the runs of GRPO."""

TRANSFORMERS = ("torch", "transformers.generation.utils", "transformers.models.qwen3.modeling_qwen3")
"""Modules that code for a saved model imports."""

STARTED = []
"""Runs that the test under way has started."""


@dataclass
class Run:
    """A run of `rl train` in a process group of its own."""

    process: subprocess.Popen
    folder: Path

    @classmethod
    def start(cls, folder, *arguments, prefix=(), **variables):
        rl = Path(sys.executable).with_name("rl")
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            command = [*prefix, str(rl), "train", *arguments, f"run_dir={folder}"]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        run = cls(process, folder)
        STARTED.append(run)
        return run

    @property
    def output(self):
        """The terminal output of this and earlier runs in the folder."""
        return (self.folder.parent / f"{self.folder.name}.log").read_text()

    def finish(self, timeout=840, *, code=0):
        assert self.process.wait(timeout) == code, self.output

    def await_step(self, step, timeout=840):
        """Wait until that many steps are in the metrics."""
        deadline = time.monotonic() + timeout
        while len(steps_of(self.folder)) < step:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def num_starts(self):
        """How often this and earlier runs in the folder have come to their first step."""
        return len(re.findall(r"^\S+ starting: ", self.output, re.MULTILINE))

    def await_start(self, number, timeout=840, *, or_end=False):
        """Wait for that many starts, or an end without an error: from then on no step in the metrics is made again."""
        deadline = time.monotonic() + timeout
        while self.num_starts < number:
            if or_end and self.process.poll() == 0:
                return
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def await_log(self, *words, timeout=840):
        """Wait until the driver or a worker has logged any of these words."""
        deadline = time.monotonic() + timeout
        while not any(each in logs_of(self.folder) for each in words):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def await_file(self, path, timeout=840):
        """Wait until a file exists."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def processes(self):
        """Everything it has started, this process included."""
        return family(psutil.Process(self.process.pid))

    @contextmanager
    def paused(self):
        """Context in which the driver does nothing: the run could end before a look at all processes does."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill_one(self, words):
        """Kill a process of the run by words of its name or command line."""
        self.signal_one(words, signal.SIGKILL)

    def signal_one(self, words, sign):
        """Send a signal to a process of the run, by words of its name or command line."""
        with self.paused():
            self.find(words).send_signal(sign)

    def find(self, words):
        """Return a process of the run, by words of its name or command line."""
        processes = self.processes()
        found = [each for each in processes if words in described(each)]
        assert found, [described(each)[:80] for each in processes]
        return found[0]

    def kill_all(self):
        """Kill all processes, as an out-of-memory killer or a lost machine would; returns them."""
        found = self.processes()
        for each in found:
            with suppress(psutil.NoSuchProcess):  # others end it as soon as the first are gone
                each.kill()
        self.process.wait(60)
        return found


def family(root):
    """A process and all that it has started, itself or through a fork server."""
    found, waiting = {}, [root]
    while waiting:
        first = waiting.pop()
        if first in found:  # an engine has a descriptor of the worker that started it
            continue
        with suppress(psutil.NoSuchProcess):
            started = [first, *first.children(recursive=True)]
            found |= dict.fromkeys(started)
            waiting += [fork for each in started for fork in _forks(each)]
    return list(found)


def _forks(process):
    """Processes that a process waits for without being their parent: it has a descriptor of them."""
    with suppress(OSError):
        for path in list(Path(f"/proc/{process.pid}/fdinfo").iterdir()):
            with suppress(OSError, psutil.NoSuchProcess):
                facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
                if (pid := int(facts.get("Pid", -1))) > 0:
                    yield psutil.Process(pid)


def described(process):
    """Name and command line of a process; empty if it has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def lines_of(folder):
    """The complete lines of `metrics.jsonl`; none before the file exists."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps_of(folder):
    """The lines of training steps."""
    return [line for line in lines_of(folder) if line["step"] > 0]


def last_kept_step(folder, before):
    """The step after which a run resumed: the last one whose line is as it was, its times included.

    Args:
        folder: Folder of the resumed run.
        before: Lines of its metrics before it resumed.
    """
    lines = zip(lines_of(folder), before, strict=False)
    return max((found["step"] for found, _ in takewhile(lambda pair: pair[0] == pair[1], lines)), default=0)


def figures(folder, *, until=None):
    """Metrics that must not depend on faults and interruptions, by step."""
    return {
        line["step"]: {name: line[name] for name in SAME if name in line}
        for line in lines_of(folder)
        if until is None or line["step"] <= until
    }


def assert_same(found, expected, names, tolerance):
    """Assert that the metrics of equally many steps agree."""
    for ours, theirs in zip(found, expected, strict=True):
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (ours["step"], name)


def rollouts_of(folder):
    """Rows of rollouts by step."""
    paths = sorted((folder / "rollouts").glob("step_*.jsonl"), key=lambda path: int(path.stem.removeprefix("step_")))
    return {
        int(path.stem.removeprefix("step_")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in paths
    }


def assert_tokens_are_those_of_rollouts(folder):
    """Assert that the values of tokens agree with the rollouts of every step, all of which are recorded."""
    for step, records in rollouts_of(folder).items():
        tokens = pyarrow.parquet.read_table(folder / "rollouts" / f"tokens_{step}.parquet").to_pylist()
        by_rollout = {number: [] for number in range(len(records))}
        for token in tokens:
            by_rollout[token["rollout"]].append(token)
        for number, record in enumerate(records):
            own = by_rollout[number]
            sampled = [token for token in own if token["weight_version"] is not None]
            assert {(token["prompt_id"], token["index"]) for token in own} == {(record["prompt_id"], record["index"])}
            # nobody sampled a demonstration, with any weights
            written = [token for token in own if token["loss_mask"]] if record.get("demonstration") else sampled
            assert len(written) == record["num_sampled"]
            spans = [span["version"] for span in record["weight_spans"] for _ in range(span["end"] - span["start"])]
            assert [token["weight_version"] for token in sampled] == spans
            lengths = [sum(token["segment"] == each for token in own) for each in range(1 + own[-1]["segment"])]
            assert lengths == [each["num_tokens"] for each in record.get("segments", [{"num_tokens": len(own)}])]
            # special tokens, such as the end of a turn, are not part of its text
            text = b"".join(token["text"] for token in written if not token["is_special"]).decode()
            # in the order of tokens, which need not be the order of time
            turns = record.get("turns") or [turn for segment in record["segments"] for turn in segment["turns"]]
            assert text == "".join(turn["text"] for turn in turns)
            trained = [token for token in own if token["loss_mask"]]
            assert all((token["advantage"] is None) == (record["advantage"] is None) for token in trained)
            assert all(token["generation_logprob"] <= 0 for token in sampled)


def logs_of(folder):
    """Everything that driver and workers logged."""
    return "".join(path.read_text() for path in sorted((folder / "logs").glob("*.log")))


def assert_no_shared_memory_is_left(before, timeout=60):
    """Assert that shared memory holds no new file that no process uses.

    Args:
        before: files that existed before.
        timeout: for processes that make or remove some, as runs beside this one do.
    """
    deadline = time.monotonic() + timeout
    while left := shared_memory() - before - _in_use():
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def shared_memory():
    """Files in shared memory."""
    return {str(path) for path in Path("/dev/shm").rglob("*") if not path.is_dir()}


def _in_use():
    """Files that a process has open or mapped."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.update(each.path for each in process.memory_maps())
            found.update(each.path for each in process.open_files())
        except psutil.Error:
            continue
    return found


def by_transformers(script, *arguments, given=""):
    """Output of Python code in the trainer's environment, which has transformers; no code of this project is imported.

    Args:
        script: code.
        arguments: of the code.
        given: its standard input.
    """
    command = fork_server.command(python_of(POLICIES, "dtensor"), TRANSFORMERS)
    command += ["-c", script, *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_of(group, name):
    """Interpreter of the environment that a worker of a plugin has."""
    spec = worker_env_of(group, name)
    return provision([spec])[spec]


def worker_env_of(group, name):
    """The environment that a worker of a plugin has."""
    also = LOSSES if group == POLICIES else ROLLOUT_WORKER
    return worker_env(plugin(group, name).requirement, "cpu", also=(also,))
