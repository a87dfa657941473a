"""Completions that a run keeps, so that its steps can be made again without sampling."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rl_algos.rollouts.driver.saved import packed_turns, unpacked_turns
from rl_core.rollouts.pool import RolloutTask, RolloutTurns

_LENGTHS = struct.Struct("<QQ")

_SUFFIX = ".turns"


def key_of(task: RolloutTask, version: int) -> str:
    """Return the key of a group: the same whenever it runs again.

    Args:
        task: The group.
        version: Weight version that it begins with. The same prompts are evaluated with the same seeds at each version;
            the seeds of a training group belong to one draw, whatever version samples it.
    """
    kind = f"evaluated at {version}" if task.is_urgent else "trained"
    return f"{task.prompt.id}/{kind}/{','.join(map(str, task.seeds))}"


class TurnsRecorder:
    """Appends the turns of finished groups to a file of this process.

    Args:
        folder: Folder of the run's recorded turns.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.uname().nodename}-{os.getpid()}{_SUFFIX}"

    def write(self, key: str, turns: Sequence[RolloutTurns]) -> None:
        """Append the turns of the rollouts of a group, without the environment's answers: it scores them again."""
        name, data = key.encode(), packed_turns(turns)
        with self._path.open("ab") as file:
            file.write(_LENGTHS.pack(len(name), len(data)) + name + data)


def read_turns(folder: Path) -> dict[str, tuple[RolloutTurns, ...]]:
    """Return recorded turns by the key of their group, the newest of groups that ran several times. A part that a
    killed process left at the end of a file is left out.
    """
    found = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda each: each.stat().st_mtime):
        with path.open("rb") as file:
            while len(head := file.read(_LENGTHS.size)) == _LENGTHS.size:
                name_length, length = _LENGTHS.unpack(head)
                name, data = file.read(name_length), file.read(length)
                if len(data) < length:
                    break
                found[name.decode()] = unpacked_turns(data)
    return found


class RecordedTurns:
    """Gives groups the completions that a run has recorded. What was not recorded is sampled.

    Args:
        turns: Recorded turns by key.

    Attributes:
        missing: Prompts of groups that were not recorded.
    """

    def __init__(self, turns: Mapping[str, tuple[RolloutTurns, ...]]) -> None:
        self._turns = turns
        self.missing: list[str] = []

    def __call__(self, task: RolloutTask, version: int) -> RolloutTask:
        """Return a group with its recorded turns.

        Args:
            task: The group.
            version: Weight version of the replicas.
        """
        turns = self._turns.get(key_of(task, version))
        if turns is None:
            self.missing.append(task.prompt.id)
            return task
        return replace(task, turns=turns)
