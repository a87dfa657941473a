"""A run directory, read only: everything that commands and viewers read of a run.

`rl runs`, `rl show` and any other viewer read a run through `RunFolder`, and through nothing else::

    run = RunFolder("runs/grpo-math")
    run.state()                  # RunState(status="interrupted", step=120, max_steps=500, best=..., reason="SIGTERM")
    run.config()                 # config.yaml as nested plain values
    run.metrics()                # [{"step": 1, "train/loss": 0.7, "time/step": 3.1, ...}, ...]
    run.timings()                # {"generation": 1804.2, "training": 711.9, ..., "step": 2790.0}: seconds of all steps
    run.rollout_steps()          # [1, 2, ..., 120]
    list(run.rollouts(120))      # [{"prompt_id": ..., "turns": [...], "rewards": {...}, "advantage": 0.3}, ...]
    run.checkpoints()            # [SavedCheckpoint(step=120, path=..., metrics={...})]

Nothing here needs the packages of the run: `config()` and all else are plain values. A run in progress may be read at
any time; incomplete lines are left out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl_core.config import Problem, load, nearest_as_remedy
from rl_core.errors import MISSING_FILE, ConfigError, RunDirectoryError, named, require_readable
from rl_launch.run_session.checkpoints.checkpoints import saved_checkpoints
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.directory import lock
from rl_launch.run_session.directory.run_state import Labels, RunState
from rl_launch.run_session.rollouts import rollout_store
from rl_launch.run_session.rollouts.run_files import MetricsFile, metrics_row

DESCRIPTION = "run.json"
CONFIG = "config.yaml"

_TAIL_BYTES = 2**16
_DEEPEST = 3

RUNS = "runs"
"""Default folder of new runs."""


@dataclass(frozen=True)
class Description:
    """The identity of a run.

    Args:
        algorithm: Empty if unknown.
        model: `policy.model_name`; empty if there is none.
        created: Creation time in ISO format with the time zone; empty if unknown.
        versions: Versions of this project's packages at its first start.
        origin: For a branch, `run_dir`, `step` and `checkpoint` that it started from; empty for any other run.
        labels: Name, group, tags and notes.
    """

    algorithm: str = ""
    model: str = ""
    created: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run.

    Args:
        step: Last step before it was saved.
        path: Its folder; the Hugging Face files are in `hf` below it.
        metrics: Metrics of that step.
    """

    step: int
    path: Path
    metrics: Mapping[str, float]


class RunFolder:
    """A run directory, read only.

    Args:
        path: Path of the folder.

    Raises:
        RunDirectoryError: If the folder does not exist or holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.exists():
            raise RunDirectoryError(f"{no_run(Path(path)).message}.")
        if not is_run(self.path):
            if (self.path / "eval.json").is_file():
                raise RunDirectoryError(
                    f"{path} is the folder of an evaluation, not of a run. Its results are in eval.json and its "
                    "rollouts, one per line, in rollouts.jsonl. To compare two evaluations, use `rl compare`."
                )
            if around := next(filter(is_run, self.path.absolute().parents), None):
                raise RunDirectoryError(f"{path} is a part of the run {around}. Pass that folder.")
            raise RunDirectoryError(
                f"{path} is not a run directory, because it does not contain {DESCRIPTION} and {CONFIG}. Run `rl runs` "
                "to list the runs."
            )

    def __repr__(self) -> str:
        state = self.state()
        steps = f"step {state.step}" + (f" of {state.max_steps}" if state.max_steps else "")
        return f"RunFolder({str(self.path)!r}, {state.status}, {steps})"

    @property
    def logs(self) -> Path:
        """Logs of the driver and its workers."""
        return self.path / "logs"

    def description(self) -> Description:
        """Return the identity of the run. Reads only small files."""
        data: Any = {}
        with suppress(*MISSING_FILE, ValueError), named(self.path / DESCRIPTION):
            data = json.loads((self.path / DESCRIPTION).read_bytes())
        data = data if isinstance(data, dict) else {}
        known = {name: data[name] for name in ("algorithm", "model", "created", "versions", "origin") if name in data}
        if "algorithm" not in known:
            config = self.config()
            policy = config.get("policy")
            model = policy.get("model_name", "") if isinstance(policy, dict) else ""
            known |= {"algorithm": str(config.get("algorithm", "")), "model": str(model)}
        return Description(**known, labels=Labels.read(data))

    def is_of_this_version(self) -> bool:
        """Return whether the run was first started by the version that is installed."""
        return self.description().versions.get("rl-launch") == version("rl-launch")

    def config(self) -> dict[str, Any]:
        """Return the run's config as nested plain values, interpolations of environment variables as they were written;
        empty if the file is damaged."""
        with suppress(*MISSING_FILE):
            require_readable(self.path / CONFIG)
        try:
            return load(self.path / CONFIG).plain()
        except ConfigError:
            return {}

    def state(self) -> RunState:
        """Return the current state of the run, which is `interrupted` if its process is gone."""
        state = RunState.read(self.path) or self._derived_state()
        if state.status != "running":
            return state
        step = max(state.step, int(self.last_metrics().get("step", 0)))
        if lock.holder(self.path) is not None:
            return replace(state, step=step)
        return replace(
            state, status="interrupted", step=step, reason="its process ended (killed, or the machine was lost)"
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every step, in order; each has `step`. Values that are not finite are None."""
        return MetricsFile(self.path / "metrics.jsonl").read()

    def last_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step; empty if there are none. Reads only the end of the file."""
        path, lines = self.path / "metrics.jsonl", []
        with suppress(FileNotFoundError), named(path), path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
        rows = (metrics_row(line.decode(errors="replace")) for line in reversed(lines))
        return next((row for row in rows if row is not None), {})

    def timings(self) -> dict[str, float]:
        """Return the total seconds of all steps by phase, longest first; `step` is the whole step."""
        return timings_of(self.metrics())

    def rollout_steps(self, kind: rollout_store.Kind = "step") -> list[int]:
        """Return the steps whose rollouts were written, in order; with `val`, the steps with a validation."""
        return rollout_store.steps_in(self.path / "rollouts", kind)

    def rollouts(self, step: int, kind: rollout_store.Kind = "step") -> Iterator[dict[str, Any]]:
        """Yield the rollouts of a step, or with `val` of its validation, one mapping each; a line that was cut short is
        left out.

        Raises:
            RunDirectoryError: If none were written, naming the steps that have some.
        """
        try:
            file = rollout_store.open_step(self.path / "rollouts", step, kind)
        except FileNotFoundError:
            steps = self.rollout_steps(kind)
            what = "validation rollouts" if kind == "val" else "rollouts"
            known = f"it has rollouts of steps {steps[0]} to {steps[-1]}" if steps else "it has none"
            raise RunDirectoryError(f"{self.path} has no {what} of step {step}; {known}.") from None
        with named(rollout_store.file_of(self.path / "rollouts", step, kind)), file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the checkpoints, in order, without opening them."""
        return [step for step, _ in saved_checkpoints(self.path / "checkpoints")]

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Return the readable checkpoints, ordered by step."""
        found = []
        for step, path in saved_checkpoints(self.path / "checkpoints"):
            try:
                found.append(SavedCheckpoint(step, path, CheckpointManifest.read(path).metrics))
            except ValueError:
                continue
        return found

    def best_checkpoint(self) -> SavedCheckpoint | None:
        """Return the checkpoint with the best value of `checkpointing.metric_name`, or the newest if none has a value;
        None if there is no checkpoint."""
        checkpointing = self.config().get("checkpointing") or {}
        key = str(checkpointing.get("metric_name") or "").replace(":", "/", 1)
        sign = 1 if checkpointing.get("higher_is_better", True) else -1
        saved = self.checkpoints()
        ranked = [each for each in saved if each.metrics.get(key) is not None]
        return max(ranked, key=lambda each: sign * each.metrics[key]) if ranked else saved[-1] if saved else None

    def saved_step(self) -> int:
        """Return a step that the run has certainly saved a checkpoint of, whether or not it still exists: the last one
        if the run recorded it; 0 if there is none."""
        state, written = self.state(), self.config().get("checkpointing") or {}
        if state.saved is not None or not written.get("enabled", True):
            return state.saved or 0
        if state.status == "finished":
            return state.step
        # The save of a period ends before the save of the next one begins.
        period = written.get("save_period") or 0
        return max(0, (state.step // period - 1) * period) if period else 0

    def changed_at(self) -> datetime:
        """Return the time of the run's last write."""
        names = ("metrics.jsonl", "state.json", DESCRIPTION)
        times = [path.stat().st_mtime for name in names if (path := self.path / name).is_file()]
        return datetime.fromtimestamp(max(times)).astimezone()

    def _derived_state(self) -> RunState:
        """Return the state of a run without a state file."""
        config = self.config()
        section = config.get(str(config.get("algorithm")))
        bound = section.get("max_num_steps") if isinstance(section, dict) else None
        steps = self.checkpoint_steps()
        step = steps[-1] if steps else int(self.last_metrics().get("step", 0))
        max_steps = bound if isinstance(bound, int) else 0
        if lock.holder(self.path) is not None:
            return RunState("running", step, max_steps)
        return RunState("finished" if max_steps and step >= max_steps else "interrupted", step, max_steps)


def timings_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds of all steps by phase, longest first; `step` is the whole step."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name.removeprefix("time/"): row[name] for name in row if name.startswith("time/") and row[name]})
    return dict(total.most_common())


def no_run(path: Path) -> Problem:
    """Return the problem of the path of a run that does not exist, with similar runs in the same folder."""
    folder = path.expanduser().parent
    is_default = path.parts[:1] == (RUNS,) or not folder.is_dir() or folder == Path()
    listed = f"Run `rl runs{'' if is_default else f' {folder}'}` to list the runs"
    meant = nearest_as_remedy(str(path), map(str, runs_in(folder)))
    return Problem("", f"there is no run at {path}", remedy=f"{meant} {listed}".strip())


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly in a folder, sorted; empty if the folder does not exist."""
    return sorted(filter(is_run, folder.iterdir())) if folder.is_dir() else []


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory."""
    return (path / DESCRIPTION).is_file() and (path / CONFIG).is_file()


def find_runs(folder: str | Path = RUNS) -> list[RunFolder]:
    """Return the runs in a folder and the folders below it, or the folder itself if it is one; sorted by path.

    Raises:
        RunDirectoryError: If there is no such folder.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise RunDirectoryError(
            f"{folder} is not a folder. Pass a run, or a folder that contains runs, such as {RUNS}."
        )
    return [RunFolder(each) for each in sorted(_runs_below(path, _DEEPEST))]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        for path in below:
            try:
                yield from _runs_below(Path(path), depth - 1)
            except PermissionError:
                continue
