"""`rl replay`: a step of a run made again from its recorded completions, and compared with what it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import pdb
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rl_algos.rollouts.recorded import RecordedTurns
from rl_core import resolve
from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_launch.commands.train import ReplayedSteps, train
from rl_launch.run_config.reading import read_plan
from rl_launch.run_session.checkpoints.checkpoints import saved_checkpoints
from rl_launch.run_session.directory.branch import BranchPoint
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.observer import RunObserver
from rl_launch.run_session.rollouts.rollout_store import open_step, steps_in

_log = logging.getLogger(__name__)

TURNS = "turns"
"""Folder of the recorded turns in a run directory."""

FOLDER = "replays"
"""Folder of the replays in a run directory."""

STAGES = {
    "rollouts": ("rollout/", "generation/num_tokens"),
    "rewards": ("reward/", "environment/"),
    "advantages": ("advantage/", "teacher/"),
    "logprobs": (),
    "loss": ("train/loss", "train/num_tokens", "policy/", "mismatch/", "critic/", "filters/", "demonstrations/"),
    "gradient": ("train/grad_norm", "train/skipped_steps"),
    "update": (),
    "validation": ("val/", "eval/"),
}
"""Stages of a step in their order, with the beginnings of the names of their metrics."""

_COMPUTING = ("values", "logprobs", "teacher", "critic_training", "training")
_BREAKS = {
    "rollouts": ("begin", _COMPUTING),
    "rewards": ("begin", _COMPUTING),
    "advantages": ("begin", ("critic_training", "training")),
    "logprobs": ("end", ("logprobs",)),
    "loss": ("end", ("training",)),
    "gradient": ("end", ("training",)),
    "update": ("end", ("training",)),
    "validation": ("end", ("validation",)),
}
"""For each stage, the edge and the phases of the loop; the first of them has all that the stage has made."""

_SPEED = "_per_second"
"""End of the names of metrics that depend on the clock."""

_HEADER = 8
"""Bytes of the length of a safetensors header."""


@dataclass(frozen=True)
class Difference:
    """Something that a replay made otherwise.

    Args:
        what: A metric, or a value of a row with the place of the row.
        recorded: The value of the run.
        replayed: The value of the replay.
    """

    what: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return f"{self.what} was {self.recorded!r:.200} and is {self.replayed!r:.200}"


@dataclass(frozen=True)
class Stage:
    """A stage of a step that was compared.

    Args:
        step: Step that it belongs to.
        name: Name of the stage.
        num_compared: Number of values that were compared.
        differences: The values that differ, in order.
    """

    step: int
    name: str
    num_compared: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class ReplayReport:
    """A step beside its replay.

    Args:
        run: Run directory.
        step: Number of the step.
        checkpoint: Step of the checkpoint that the replay began with.
        folder: Run directory of the replay.
        stages: The stages of the step in their order; those of which nothing is recorded are left out.
        first: The first stage that differs, of this step or of one between the checkpoint and it; None if all were made
            again as they were.
        missing: Number of groups whose completions were not recorded, so that they were sampled.
        changed: Keys of the config that were changed, and the row if the step was made of one alone.
        profiles: Files of the profiler.
    """

    run: str
    step: int
    checkpoint: int
    folder: str
    stages: tuple[Stage, ...]
    missing: int
    changed: tuple[str, ...]
    first: Stage | None
    profiles: tuple[str, ...] = ()


class Breakpoints(RunObserver):
    """Stops a step at stages: opens a debugger in the frame of the loop, or calls a function of the user's.

    Args:
        step: The step.
        stages: Stages, each with `file.py:function` or `package.module:function`, which gets the step and the variables
            of the loop by name; empty for the debugger.

    Attributes:
        failure: The error of a function of the user's; None if there is none.

    Raises:
        ConfigError: If there is no such stage or function.
    """

    def __init__(self, step: int, stages: Mapping[str, str]) -> None:
        self._step, self._is_here = step, False
        self._wanted: dict[str, Callable[..., Any] | None] = {}
        self.failure: RLError | None = None
        for stage, name in stages.items():
            if stage not in _BREAKS:
                raise ConfigError(f"--break {stage}: there is no such stage. The stages are {', '.join(_BREAKS)}")
            try:
                self._wanted[stage] = resolve(name) if name else None
            except (ValueError, ImportError) as error:
                raise ConfigError(f"--break {stage}={name}: {error}") from None

    @property
    def unreached(self) -> tuple[str, ...]:
        """Stages at which nothing has stopped yet."""
        return tuple(self._wanted)

    def begin_step(self, step: int) -> None:
        self._is_here = step == self._step

    def begin_phase(self, name: str) -> None:
        self._reach("begin", name)

    def end_phase(self, name: str) -> None:
        self._reach("end", name)

    def _reach(self, edge: str, phase: str) -> None:
        for stage, call in list(self._wanted.items()):
            if self._is_here and _BREAKS[stage][0] == edge and phase in _BREAKS[stage][1]:
                del self._wanted[stage]
                self._stop(stage, call, _frame_of_the_loop())

    def _stop(self, stage: str, call: Callable[..., Any] | None, frame: FrameType) -> None:
        if call is None:
            sys.stderr.write(f"step {self._step}, {stage}: the variables of the loop are at hand; c continues\n")
            debugger = _debugger()
            debugger.reset()
            debugger.interaction(frame, None)
            if debugger.quitting:
                raise KeyboardInterrupt
            return
        try:
            call(self._step, dict(frame.f_locals))
        except Exception as error:  # noqa: BLE001  # of the user's function
            self.failure = RLError(f"--break {stage}: the function raised {type(error).__name__}: {error}")


def _debugger() -> pdb.Pdb:
    """Return the debugger of IPython if it is installed, else Python's."""
    with contextlib.suppress(ImportError):
        kind: type[pdb.Pdb] = import_module("IPython.terminal.debugger").TerminalPdb
        return kind()
    return pdb.Pdb()


def _frame_of_the_loop() -> FrameType:
    """Return the innermost frame of an algorithm."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("rl_algos."):
        frame = frame.f_back
    return frame or sys._getframe(1)


class OneRow:
    """Trains a step on one of its rollouts. All others keep their rewards, and so its advantage, but no token of theirs
    is under the loss.

    Args:
        records: The rollouts of the step, as the run recorded them.
        row: Place of the rollout among them.

    Raises:
        RunDirectoryError: If the step has no such rollout.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]] | None, row: int) -> None:
        if records is None or not 0 <= row < len(records):
            count = f"has the rollouts 0 to {len(records) - 1}" if records else "has recorded no rollouts"
            raise RunDirectoryError(f"--row {row}: there is no such row; the step {count}")
        self._prompts = {record["prompt_id"] for record in records}
        self._prompt, self._index = records[row]["prompt_id"], int(records[row]["index"])

    def __call__(self, group: RolloutGroup) -> RolloutGroup:
        if group.prompt.id not in self._prompts:
            return group
        lengths = [len(each) for each in group.rollouts.row_lengths]
        others = np.array([group.prompt.id != self._prompt or index != self._index for index in range(len(lengths))])
        return replace(group, columns=group.columns.with_zeros(LOSS_MASK, np.repeat(others, lengths)))


def replay(
    text: str,
    overrides: Sequence[str],
    *,
    stops: Mapping[str, str] | None = None,
    row: int | None = None,
    is_profiled: bool = False,
) -> ReplayReport:
    """Make a step of a run again, from the newest checkpoint before it and the completions that the run recorded.

    Args:
        text: `RUN:STEP`.
        overrides: Keys that are changed, as `key=value`.
        stops: See `Breakpoints`.
        row: The rollout that the step is trained on alone, by its place in the record; None for all.
        is_profiled: Profile the workers during the step, as `profiling.steps` does.

    Raises:
        RunDirectoryError: If the run has no such step, no checkpoint before it, or no recorded completions.
        ConfigError: If the changed config has problems.
    """
    name = CheckpointName.parse(text)
    if name is None or name.step is None:
        raise ConfigError(f"{text!r} names no step of a run; give it as RUN:STEP, such as runs/grpo:20")
    run, step = RunFolder(name.run.absolute()), int(name.step)
    start = _checkpoint_before(run, step)
    folder = _free_folder(run.path / FOLDER, step)
    fixed = (
        f"run_dir={folder}",
        "checkpointing.async_save=false",
        "checkpointing.export_period=null",
        "logger.replay_enabled=false",
        "callbacks=[]",
    )
    profiled = f"profiling.steps=[{step}, {step}]" if is_profiled else "profiling.steps=null"
    plan = read_plan(run.path, [*overrides, *fixed, profiled])
    breakpoints = Breakpoints(step, stops or {})
    if row is not None and not plan.plugin.generates:
        raise ConfigError(f"--row {row}: {run.path} makes no rollouts; only a rollout can be trained on alone")
    alone = None if row is None else OneRow(_records(run, step), row)
    turns = RecordedTurns(run.path / TURNS)
    if plan.plugin.generates and not turns.keys:
        raise RunDirectoryError(
            f"{run.path} has not recorded its completions, without which a step cannot be made again. Train with "
            "logger.replay_enabled=true"
        )
    replayed = ReplayedSteps(turns, step, alone, breakpoints)
    point = BranchPoint.parse(f"{run.path}:{start}")
    ended = train(plan, run_dir=folder, title=f"replay of step {step}", branch_point=point, replayed=replayed)
    if ended.stop_signal is not None:
        raise RLError(f"{ended.stop_signal.name} ended the replay before step {step} was made; run the command again")
    if breakpoints.failure is not None:
        raise breakpoints.failure
    for stage in breakpoints.unreached:
        _log.warning("--break %s: step %d of this run has no such stage, so nothing has stopped there", stage, step)
    other = RunFolder(folder)
    made = [stage for number in range(start + 1, step + 1) for stage in compared(run, other, number)]
    return ReplayReport(
        str(run.path),
        step,
        start,
        str(folder),
        tuple(stage for stage in made if stage.step == step),
        len(replayed.turns.missing),
        (*overrides, *([] if row is None else [f"row {row} alone"])),
        next((stage for stage in made if stage.differences), None),
        tuple(str(path) for path in sorted((folder / "profiles").rglob("*.*"))),
    )


def _checkpoint_before(run: RunFolder, step: int) -> int:
    """Return the step of the newest checkpoint before a step, from which all records up to the step are there.

    Raises:
        RunDirectoryError: If the run has no such step or checkpoint, or a record is gone or damaged.
    """
    made = {row["step"] for row in run.metrics()}
    if step not in made:
        last = max(made, default=0)
        raise RunDirectoryError(f"{run.path} has no step {step}; it has made {last} steps")
    earlier = [saved for saved, _ in saved_checkpoints(run.path / "checkpoints") if saved < step]
    if not earlier:
        raise RunDirectoryError(
            f"{run.path} has no checkpoint before step {step} to begin with. A run keeps "
            "checkpointing.keep_top_k checkpoints (null: all), one every checkpointing.save_period steps"
        )
    start = earlier[-1]
    # A record that is damaged is found before the steps are made again.
    for number in range(start + 1, step + 1):
        if number not in made:
            raise RunDirectoryError(
                f"{run.path / 'metrics.jsonl'} has no step {number}, which lies between the checkpoint step_"
                f"{start} and step {step}. Restore the file, or replay another step"
            )
        _records(run, number)
    return start


def _free_folder(folder: Path, step: int) -> Path:
    number = 1
    while (found := folder / (f"step_{step}" if number == 1 else f"step_{step}-{number}")).exists():
        number += 1
    return found


def compared(run: RunFolder, other: RunFolder, step: int) -> Iterator[Stage]:
    """Yield the stages of a step in their order, compared between two runs."""
    rows = [next(row for row in each.metrics() if row["step"] == step) for each in (run, other)]
    was, found_again = (_records(each, step) for each in (run, other))
    for name, metrics in STAGES.items():
        found: list[tuple[str, Any, Any]] = []
        if was is not None and found_again is not None:
            found += _of_records(name, was, found_again)
        if name == "logprobs":
            found += _of_tokens(run, other, step)
        if name == "update":
            found += _of_weights(run, other, step)
        measured = [key for key in rows[0] if metrics and key.startswith(metrics) and not key.endswith(_SPEED)]
        found += [(key, rows[0][key], rows[1].get(key)) for key in measured]
        if found:
            yield Stage(step, name, len(found), tuple(Difference(*each) for each in found if not _equal(*each[1:])))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first) and math.isnan(second):
        return True
    return bool(first == second)


def _records(run: RunFolder, step: int) -> list[Mapping[str, Any]] | None:
    folder = run.path / "rollouts"
    if step not in steps_in(folder):
        return None
    with _undamaged(f"the rollouts of step {step} in {folder}"), open_step(folder, step) as file:
        return [json.loads(line) for line in file]


@contextlib.contextmanager
def _undamaged(what: str) -> Iterator[None]:
    """Turn errors of reading a record of the run into one message with the remedy."""
    try:
        yield
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RunDirectoryError(
            f"{what} cannot be read ({error}). Restore the file, or remove it to compare the step without it"
        ) from None


def _of_records(
    stage: str, first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield values of the rollouts: their texts, rewards or advantages."""
    if stage == "rollouts":
        yield "number of rollouts", len(first), len(second)
    for place, (was, found) in enumerate(zip(first, second, strict=False)):
        row = f"rollout {place} (prompt {was['prompt_id']}, number {was['index']})"
        if stage == "rollouts":
            yield f"prompt of {row}", was["prompt_id"], found["prompt_id"]
            text, text_again = ([turn.get("text") for turn in each.get("turns", ())] for each in (was, found))
            yield f"text of {row}", text, text_again
            status, again = ((each["status"], each.get("failure", "")) for each in (was, found))
            yield f"status of {row}", status, again
        elif stage == "rewards":
            yield f"rewards of {row}", was["rewards"], found["rewards"]
        elif stage == "advantages":
            yield f"advantage of {row}", was["advantage"], found["advantage"]


def _of_tokens(run: RunFolder, other: RunFolder, step: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the logprobs of the tokens that both have recorded."""
    import pyarrow.parquet as pq

    tables = []
    for each in (run, other):
        folder = each.path / "rollouts"
        if step not in steps_in(folder, "tokens"):
            return
        with _undamaged(f"the tokens of step {step} in {folder}"), open_step(folder, step, "tokens") as file:
            names = ("prompt_id", "index", "segment", "position", "logprob")
            columns = pq.ParquetFile(file).read(columns=list(names)).to_pydict()
        tables.append({tuple(key): value for *key, value in zip(*(columns[name] for name in names), strict=True)})
    for key in (key for key in tables[0] if key in tables[1]):
        prompt, index, segment, position = key
        place = f"prompt {prompt}, number {index}, segment {segment}, position {position}"
        yield f"logprob of the token at {place}", tables[0][key], tables[1][key]


def _of_weights(run: RunFolder, other: RunFolder, step: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the digests of the exported models of both checkpoints, if the run has one of the step."""
    folders = [each.path / "checkpoints" / f"step_{step}" for each in (run, other)]
    if not all(folder.is_dir() for folder in folders):
        return
    for path in sorted(folders[0].rglob("*.safetensors")):
        name = path.relative_to(folders[0])
        with _undamaged(str(path)):
            digest = tensor_digest(path)
        yield f"weights in {name}", digest, tensor_digest(folders[1] / name)


def tensor_digest(path: Path) -> str:
    """Return the SHA-256 of the tensors in a safetensors file, whatever the order of its metadata; empty if there is no
    file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(_HEADER), "little")))
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        while part := file.read(2**24):
            digest.update(part)
    return digest.hexdigest()
