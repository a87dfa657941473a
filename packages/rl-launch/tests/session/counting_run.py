"""A run without engines: a model that counts its steps, as a module that tests import and also start as a process."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from rich.console import Console

from rl_core.config import Config, WhenChanged
from rl_core.errors import CheckpointDamaged
from rl_core.model import SavedFile
from rl_launch.run_session import CheckpointingConfig, LoggerConfig, RunSession


class LoopConfig(Config):
    max_num_steps: Annotated[int, WhenChanged.GOAL] = 6
    learning_rate: float = 0.1


class CountingConfig(Config):
    run_dir: Annotated[str | None, WhenChanged.RESUME] = None
    loop: LoopConfig = LoopConfig()
    checkpointing: CheckpointingConfig = Field(default=CheckpointingConfig(save_period=2))
    logger: LoggerConfig = LoggerConfig(tensorboard_enabled=False)


class CountingModel:
    """Its weights are the history of what it has seen."""

    trains = True

    def __init__(self) -> None:
        self.weights = np.zeros(1)
        self.num_saves = 0
        self.files: tuple[SavedFile, ...] = ()

    def train(self, value: float) -> float:
        self.weights = self.weights * 1.5 + value
        return float(self.weights[0])

    def save(self, path: str, *, wait: bool = True) -> None:
        self.num_saves += 1
        self.files = (written(Path(path) / "weights.npy", self.weights),)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        return self.files

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        for file in files:
            if hashlib.sha256((Path(path) / file.path).read_bytes()).hexdigest() != file.sha256:
                raise CheckpointDamaged(f"{file.path} has other contents than were saved")
        self.weights = np.load(Path(path) / "weights.npy")

    def export(self, path: str) -> tuple[SavedFile, ...]:
        content = json.dumps({"weights": self.weights.tolist()})
        (Path(path) / "config.json").write_text(content)
        return (SavedFile("config.json", len(content), None, 0),)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        return ()


class PatientModel(CountingModel):
    """One that writes behind: what it was asked to save is there after it was asked about it some times."""

    def __init__(self, num_asks: int = 2, failure: Exception | None = None) -> None:
        super().__init__()
        self.num_asks = num_asks
        self.failure = failure
        self._asks_left = 0
        self._copy: tuple[Path, np.ndarray] | None = None

    def save(self, path: str, *, wait: bool = True) -> None:
        if wait:
            super().save(path)
            return
        assert self._copy is None
        self.num_saves += 1
        self._copy = Path(path) / "weights.npy", self.weights.copy()
        self._asks_left = self.num_asks

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        if self._copy is None:
            return self.files
        self._asks_left -= 1
        if self._asks_left > 0 and not wait:
            return None
        (path, weights), self._copy = self._copy, None
        if self.failure is not None:
            path.write_text("half")
            raise self.failure
        self.files = (written(path, weights),)
        return self.files


def written(path: Path, weights: np.ndarray) -> SavedFile:
    np.save(path, weights)
    content = path.read_bytes()
    return SavedFile(path.name, len(content), hashlib.sha256(content).hexdigest(), 0)


class Draws:
    """A data position: random numbers."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)

    def draw(self) -> float:
        return float(self.random.standard_normal())

    def state(self) -> Mapping[str, Any]:
        return {"generator": self.random.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.random.bit_generator.state = state["generator"]


def config(max_num_steps: int = 6, **checkpointing: Any) -> CountingConfig:
    return CountingConfig(
        loop=LoopConfig(max_num_steps=max_num_steps), checkpointing=CheckpointingConfig(save_period=2, **checkpointing)
    )


def run(
    run_dir: Path,
    settings: CountingConfig,
    *,
    fresh: bool = False,
    at_step: Any = lambda run, step: None,
    model: CountingModel | None = None,
) -> RunSession:
    """Run the loop to its end; `at_step` is called inside each step."""
    model, draws = model or CountingModel(), Draws()
    with RunSession(run_dir, settings, fresh=fresh, console=Console(file=open(os.devnull, "w"))) as session:
        for step in session.steps(settings.loop.max_num_steps, models={"policy": model}, state={"draws": draws}):
            with session.phase("training"):
                value = model.train(draws.draw())
            session.record(step, {"train/loss": value, "val/accuracy": 1.0 / step})
            at_step(session, step)
    return session


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """Lines of `metrics.jsonl` without what depends on the clock."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def _as_process(run_dir: Path, kill_at: int, kill_in: str) -> None:
    """The run as a process of its own, killed without warning in a step, in the middle of a save, or in a step while a
    save goes on behind it."""

    class Killed(PatientModel if kill_in == "background" else CountingModel):
        def export(self, path: str) -> tuple[SavedFile, ...]:
            if kill_in == "save" and self.num_saves * 2 >= kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().export(path)

    def at_step(session: RunSession, step: int) -> None:
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        if kill_in != "save" and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if kill_in == "never":
            time.sleep(0.2)

    run(run_dir, config(async_save=kill_in == "background"), at_step=at_step, model=Killed())


def _signalled_at_every_rename(folder: Path, number: int) -> None:
    """Runs in `folder`, each sent a signal before another of its renames and then resumed in the same folder; prints
    the number of renames of a whole run."""
    for count in itertools.count(1):
        if _signalled(folder / str(count), count, number) == 0:
            sys.stdout.write(f"{count - 1}\n")
            return


def _signalled(run_dir: Path, at_rename: int, number: int) -> int:
    """0 if the run ended before as many renames, else 1; a child makes it, so that it may be killed."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        return 1 if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    left = itertools.count(at_rename - 1, -1)
    was_sent = False

    def counted(rename: Any) -> Any:
        def call(self: Path, target: Path) -> Path:
            nonlocal was_sent
            if next(left) == 0:
                was_sent = True
                os.kill(os.getpid(), number)
            return rename(self, target)

        return call

    Path.replace, Path.rename = counted(Path.replace), counted(Path.rename)  # type: ignore[method-assign]
    try:
        run(run_dir, config())
    finally:
        os._exit(int(was_sent))


if __name__ == "__main__" and sys.argv[2] == "renames":
    _signalled_at_every_rename(Path(sys.argv[1]), int(sys.argv[3]))
elif __name__ == "__main__":
    _as_process(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
