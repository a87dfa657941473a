"""Files, memory and time per step of a run of 10,000 GRPO steps.

    python benchmarks/long_run.py [--steps 10000] [--save-period 100]

The driver's side is the product's own: the GRPO loop, the stream of prompts, the ledger, the run session with its
metrics, rollouts, checkpoints and log. The model and the engine compute nothing, so that what is left is what a run
adds to each step. Time per step and memory must not grow with the number of steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measurement import surroundings, table
from pydantic import Field
from rich.console import Console

from rl_algos.data.stream import Stream
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.loop import train
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_core.config import Config
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.fakes import FakeModel, FakeWeights
from rl_launch.run_session import CheckpointingConfig, LoggerConfig, RunSession

PROMPTS, GROUP, WORDS = 4, 4, 200
WINDOW = 50
"""Steps before a mark whose median is its time per step."""

_READ = """
import sys, time
from rl_launch.run_session.directory.run_folder import RunFolder
started = time.perf_counter()
run = RunFolder(sys.argv[1])
run.metrics(), list(run.rollouts(run.rollout_steps()[0])), run.state()
print(time.perf_counter() - started)
"""


class SessionSettings(Config):
    checkpointing: CheckpointingConfig = Field(default=CheckpointingConfig())
    logger: LoggerConfig = LoggerConfig(tensorboard_enabled=False)


@dataclass(frozen=True)
class Mark:
    """The state of a run after a step: milliseconds per step, and sizes in MiB."""

    step: int
    step_ms: float
    memory: float
    num_files: int
    size: float
    rollouts: float
    metrics: float
    num_open: int
    read_s: float


class ForgetfulModel(FakeModel):
    """A `FakeModel` that does not keep the batches it was given."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.clear()
        return super().train_step(*args, **kwargs)


class InstantPool:
    """Ends every group at once, with completions of random words."""

    num_replicas = 1

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._tasks: dict[int, Any] = {}
        self._num_tasks = 0
        self._version = 0

    def speculation(self) -> None:
        """Return None: no engine drafts."""

    def submit(self, tasks: Sequence[Any]) -> list[int]:
        tickets = list(range(self._num_tasks, self._num_tasks + len(tasks)))
        self._num_tasks += len(tasks)
        self._tasks.update(zip(tickets, tasks, strict=True))
        return tickets

    def next_done(self) -> tuple[int, RolloutGroup]:
        ticket = next(iter(self._tasks))
        prompt = self._tasks.pop(ticket).prompt
        return ticket, RolloutGroup.of(prompt, [self._rollout(prompt, place) for place in range(GROUP)])

    def adopt(self, update: Any, *, in_flight: bool = False) -> None:
        self._version = update.version

    def turns(self) -> Mapping[int, Any]:
        return {}

    def idle_share(self) -> float | None:
        return None

    def _rollout(self, prompt: Prompt, place: int) -> Rollout:
        tokens = self._random.integers(0, 5000, WORDS, dtype=np.int32)
        text = " ".join(f"word{token}" for token in tokens.tolist())
        return Rollout(
            prompt_id=prompt.id,
            tokens=np.concatenate([prompt.token_ids, tokens]),
            loss_mask=np.repeat(np.array([0, 1], np.uint8), [len(prompt.token_ids), WORDS]),
            generation_logprobs=np.zeros(len(prompt.token_ids) + WORDS, np.float32),
            spans=(WeightSpan(self._version, WORDS),),
            turns=(Turn(text, None, {"reward": float(place % 2)}),),
            rewards={"reward": float(place % 2)},
            stop_reason="stop",
        )


class MarkedSession(RunSession):
    """A session that notes its state after some steps."""

    def __init__(self, run_dir: Path, settings: Any, marks: Sequence[int]) -> None:
        super().__init__(run_dir, settings, title="long run", console=Console(file=open(os.devnull, "w")))  # noqa: SIM115
        self._marked = set(marks)
        self._ends: deque[float] = deque(maxlen=WINDOW + 1)
        self.found: list[Mark] = []

    def steps(self, *args: Any, **kwargs: Any) -> Iterator[int]:
        return self._noting(super().steps(*args, **kwargs))

    def _noting(self, steps: Iterator[int]) -> Iterator[int]:
        step = 0
        for step in steps:
            self._note_time(step - 1)
            yield step
        self._note_time(step)

    def _note_time(self, step: int) -> None:
        """Note the time at which a step was complete, and the state if it is marked."""
        self._ends.append(time.perf_counter())
        if step in self._marked:
            self.found.append(self._mark(step))
            self._ends.clear()

    def _mark(self, step: int) -> Mark:
        sizes: dict[Path, int] = {}
        for path in self.directory.path.rglob("*"):
            # files move into archives meanwhile
            with suppress(FileNotFoundError):
                sizes |= {path: path.stat().st_size} if path.is_file() else {}
        process = psutil.Process()
        times = [1000 * (after - before) for before, after in pairwise(self._ends)]
        # in a process of its own, whose memory is not the driver's
        read = subprocess.run(
            [sys.executable, "-c", _READ, str(self.directory.path)], stdout=subprocess.PIPE, text=True, check=True
        )
        return Mark(
            step,
            statistics.median(times),
            process.memory_info().rss / 2**20,
            len(sizes),
            sum(sizes.values()) / 2**20,
            sum(size for path, size in sizes.items() if path.parent.name == "rollouts") / 2**20,
            sum(size for path, size in sizes.items() if path.name == "metrics.jsonl") / 2**20,
            process.num_fds(),
            float(read.stdout),
        )


def marks_of(run_dir: Path, num_steps: int, save_period: int, steps: Sequence[int]) -> list[Mark]:
    """Make a run and return its state after some of its steps."""
    settings = SessionSettings(checkpointing=CheckpointingConfig(save_period=save_period))
    config = GRPOConfig(num_prompts_per_step=PROMPTS, num_generations_per_prompt=GROUP, max_num_steps=num_steps)
    prompts = [
        Prompt(f"p{index}", ({"role": "user", "content": "a question"},), np.arange(20, dtype=np.int32), "math")
        for index in range(1000)
    ]
    sampling = SamplingParams(WORDS)
    source = PacedRolloutSource(
        InstantPool(), Stream([prompts], seed=0), sampling=sampling, num_generations=GROUP, seed=0
    )
    policy = ForgetfulModel()
    with MarkedSession(run_dir, settings, steps) as session:
        taken = RolloutSteps(config, source, FakeWeights(policy), Validation((), sampling, config), session)
        train(config, Objective(PolicyLoss()), policy=policy, steps=taken, rows_per_minibatch=PROMPTS * GROUP)
    return session.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the run (%(default)s)")
    parser.add_argument("--save-period", type=int, default=100, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--run-dir", type=Path, help="folder of the run, which is kept; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="test run: 300 steps")
    chosen = parser.parse_args()
    num_steps = 300 if chosen.quick else chosen.steps
    steps = sorted({step for step in (100, 1000, 5000, 10_000) if step < num_steps} | {num_steps})
    print(surroundings("rl-algos", "rl-core", "rl-launch"))
    with tempfile.TemporaryDirectory() as folder:
        found = marks_of(chosen.run_dir or Path(folder) / "run", num_steps, chosen.save_period, steps)
    print(f"{PROMPTS * GROUP} rollouts of {WORDS} words a step, a checkpoint every {chosen.save_period} steps\n")
    print(report(found))


def report(found: Sequence[Mark]) -> str:
    """Return the table, with the ratio of the last row to the first."""
    head = ["step", "ms per step", "memory, MiB", "files", "size, MiB", "rollouts, MiB", "metrics, MiB"]
    rows = [_row(str(mark.step), mark) for mark in found]
    first, last = _numbers(found[0]), _numbers(found[-1])
    ratio = ["last / first", *(f"{b / a:.2f}" if a else "" for a, b in zip(first, last, strict=True))]
    return table([*head, "open files", "read as `rl show`, s"], [*rows, tuple(ratio)])


def _numbers(mark: Mark) -> tuple[float, ...]:
    sizes = mark.memory, mark.num_files, mark.size, mark.rollouts, mark.metrics
    return (mark.step_ms, *sizes, mark.num_open, mark.read_s)


def _row(name: str, mark: Mark) -> tuple[str, ...]:
    ms, memory, files, size, rollouts, metrics, num_open, read = _numbers(mark)
    return (
        name,
        f"{ms:.2f}",
        f"{memory:.0f}",
        str(int(files)),
        f"{size:.1f}",
        f"{rollouts:.1f}",
        f"{metrics:.2f}",
        str(int(num_open)),
        f"{read:.3f}",
    )


if __name__ == "__main__":
    main()
