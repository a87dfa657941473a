"""Completions that a run keeps, so that its steps can be made again without sampling."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_algos.rollouts.driver.saved import packed_turns, unpacked_turns
from rl_core.errors import RunDirectoryError
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


class RecordedTurns:
    """Gives groups the completions that a run has recorded. What was not recorded is sampled.

    Only places in the files are held in memory. The newest turns count if a group ran several times, and a part that a
    killed process left at the end of a file is left out.

    Args:
        folder: Folder of the run's recorded turns, which may be missing.

    Attributes:
        missing: Prompts of groups that were not recorded.
    """

    def __init__(self, folder: Path) -> None:
        self.missing: list[str] = []
        self._places: dict[str, tuple[Path, int, int]] = {}
        for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda each: each.stat().st_mtime):
            with path.open("rb") as file:
                size = path.stat().st_size
                while len(head := file.read(_LENGTHS.size)) == _LENGTHS.size:
                    name_length, length = _LENGTHS.unpack(head)
                    start = file.tell() + name_length
                    if start + length > size:
                        break
                    self._places[file.read(name_length).decode(errors="replace")] = path, start, length
                    file.seek(start + length)

    @property
    def keys(self) -> Sequence[str]:
        """Keys of the recorded groups, the oldest file first."""
        return list(self._places)

    def read(self, key: str) -> tuple[RolloutTurns, ...]:
        """Return the turns of a recorded group.

        Raises:
            RunDirectoryError: If they are damaged.
        """
        path, start, length = self._places[key]
        with path.open("rb") as file:
            file.seek(start)
            packed = file.read(length)
        try:
            return unpacked_turns(packed)
        except ValueError as error:
            raise RunDirectoryError(
                f"{path} is damaged from byte {start} on ({error}). Restore the file, or remove it: its groups are "
                "then sampled"
            ) from None

    def __call__(self, task: RolloutTask, version: int) -> RolloutTask:
        """Return a group with its recorded turns.

        Args:
            task: The group.
            version: Weight version of the replicas.
        """
        key = key_of(task, version)
        if key in self._places:
            return replace(task, turns=self.read(key))
        self.missing.append(task.prompt.id)
        return task
