"""Messages about a run whose config has changed, with the commands to choose from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rl_core.config import ABSENT, Config, RuledChange, WhenChanged, keys_when_changed, to_override
from rl_core.config.tree import format_path, parse_path
from rl_launch.run_session.directory.run_state import RunState

_MAY_CHANGE = (WhenChanged.RESUME, WhenChanged.GOAL)
_ASKED = {
    WhenChanged.BRANCH: "needs a branch",
    WhenChanged.NEW_RUN: "needs a new run",
    WhenChanged.RESUME: "may change",
    WhenChanged.GOAL: "may change",
}


def refusal(path: str, changes: Sequence[RuledChange], tree: Any, checkpoint: Path | None) -> str:
    """Return the message that refuses to resume a run with another config; empty if the changes are allowed.

    Args:
        path: Path of the run directory.
        changes: Changes from its config to the other one.
        tree: The other config as nested plain values.
        checkpoint: The newest of the run; None if there is none.
    """
    if all(each.rule in _MAY_CHANGE for each in changes):
        return ""
    lines = [f"{path} contains a run with another config:", *described(changes)]
    allowed = [each for each in changes if each.rule in _MAY_CHANGE]
    lines.append(f"To resume the run with its config:\n  {train_command(path, allowed, tree)}")
    for_new_run = [each for each in changes if each.rule is WhenChanged.NEW_RUN]
    if checkpoint is None:
        lines.append("It has no checkpoint to branch from. Choose another run_dir for the new config.")
    elif for_new_run:
        model = shlex.quote(f"policy.model_name={checkpoint / 'hf'}")
        lines.append(f"To start a new run from its weights, give the same command with another run_dir and\n  {model}")
    else:
        lines.append(f"To branch from {checkpoint.name} with the new values, optimizer state included:")
        lines.append(f"  {train_command(path, changes, tree, branches=True)}")
    return "\n".join(lines)


def described(changes: Iterable[RuledChange]) -> list[str]:
    """Return a line for each change, with the rule for it; the strictest comes first."""
    order = list(_ASKED)
    ordered = sorted(changes, key=lambda each: order.index(each.rule) if each.rule in order[:2] else len(order))
    width = max((len(_ASKED[each.rule]) for each in ordered), default=0)
    return [f"  {_ASKED[each.rule]:{width}}  {each.change}" for each in ordered]


def train_command(path: str, changes: Sequence[RuledChange], tree: Any, *, branches: bool = False) -> str:
    """Return the command that resumes a run, or branches from it, with these changes.

    Args:
        path: Path of the run directory.
        changes: Changes to give as overrides, except `run_dir`.
        tree: The config after the changes, as nested plain values.
        branches: True to branch from the run instead of resuming it.
    """
    words = ["rl", "train", *(["--from"] if branches else []), path]
    paths = [parse_path(each.change.key) for each in changes]
    # In place of a key that no longer exists, the section around it is set.
    whole = [path[:-1] for path, each in zip(paths, changes, strict=True) if each.change.new is ABSENT]
    keys = dict.fromkeys(next((around for around in whole if path[: len(around)] == around), path) for path in paths)
    words += [to_override(format_path(key), reduce(getitem, key, tree)) for key in keys if key != ("run_dir",)]
    return shlex.join(words)


def finished(path: str, state: RunState, checkpoint_step: int | None, config: Config, *, saves: bool) -> str:
    """Return the message about a run that has nothing left to do; empty if it has, or if the goal has been changed.

    Args:
        path: Path of the run directory.
        state: Recorded state of the run.
        checkpoint_step: Step of the newest checkpoint; None if there is none.
        config: Config to resume the run with.
        saves: True if checkpoints are saved.
    """
    goals = keys_when_changed(config, WhenChanged.GOAL)
    bounds = step_bounds(config).values()
    is_saved = not saves or (checkpoint_step or 0) >= state.step
    is_done = state.status == "finished" and dict(state.goals) == goals and is_saved
    if not is_done and not (checkpoint_step and any(checkpoint_step >= bound for bound in bounds)):
        return ""
    step, reason = (state.step, state.reason) if is_done else (checkpoint_step or 0, "")
    of = state.max_steps if is_done else min(bounds)
    done = RunState("finished", step, of, reason, goals)
    keys = " or ".join(_bounding(done))
    change = f"To continue, {'change' if reason else 'increase'} {keys}: {command_to_go_on(path, done)}" if keys else ""
    return f"{path}: finished at step {step} of {of}{f' ({reason})' if reason else ''}. {change}".rstrip()


def command_to_go_on(path: str, state: RunState) -> str:
    """Return the command that continues a run: as it is, or beyond its end if it has finished; empty while it runs."""
    if state.status == "running":
        return ""
    keys = _bounding(state) if state.status == "finished" else {}
    further = {
        key: 2 * state.step if value is None else 2 * value if isinstance(value, int) else "..."
        for key, value in keys.items()
    }
    return shlex.join(["rl", "train", path, *(f"{key}={value}" for key, value in further.items())])


def _bounding(state: RunState) -> dict[str, Any]:
    """Return the keys that ended a finished run: its number of steps, or the others if it ended before that."""
    goals = {key: value for key, value in state.goals.items() if value is not None}
    steps = {key: value for key, value in goals.items() if key.endswith(".max_num_steps")}
    others = {key: value for key, value in goals.items() if key not in steps}
    reached = any(isinstance(value, int) and value <= state.max_steps for value in steps.values())
    if reached and not state.reason:
        return steps
    return others or steps or {key: None for key in state.goals if key.endswith(".max_num_steps")}


def step_bounds(config: Config) -> dict[str, int]:
    """Return the keys that bound the number of steps, with their values."""
    goals = keys_when_changed(config, WhenChanged.GOAL)
    return {key: value for key, value in goals.items() if key.endswith(".max_num_steps") and value is not None}
