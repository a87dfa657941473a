"""Files of rollouts: those of a run by step, and those of an evaluation or a single file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Protocol

from rl_launch.session.rollouts import rollout_store
from rl_launch.session.rollouts.rollout_store import file_stamp


class RolloutSource(Protocol):
    """Files of rollouts, one JSON object per line, by kind and step."""

    @property
    def path(self) -> Path:
        """The folder or the file."""
        ...

    def kinds(self) -> list[str]:
        """Return the kinds that it may have."""
        ...

    def stamps(self, kind: str) -> dict[int, str]:
        """Return the steps that have rollouts of a kind, in order, each with a string that changes if its lines do."""
        ...

    def open(self, kind: str, step: int) -> IO[bytes]:
        """Open the lines of a step; the file can seek.

        Raises:
            FileNotFoundError: If it has no rollouts.
        """
        ...


class RunRollouts:
    """Rollouts of a run: `step` for training and `val` for validations.

    Args:
        path: The folder `rollouts` of the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps = rollout_store.StepStamps(path)

    def kinds(self) -> list[str]:
        """Return `step` and `val`."""
        return ["step", "val"]

    def stamps(self, kind: str) -> dict[int, str]:
        """See `RolloutSource`."""
        found = self._stamps.now()
        return {step: found[each, step] for each, step in sorted(found, key=lambda key: key[1]) if each == kind}

    def open(self, kind: str, step: int) -> IO[bytes]:
        """See `RolloutSource`."""
        return rollout_store.open_step(self.path, step, _known(kind))


class SingleFile:
    """One file of rollouts, such as `rollouts.jsonl` of an evaluation. Its only step is 0.

    Args:
        path: Path of the file, which may not exist yet.
        kind: Kind of its rollouts.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._kind = kind

    def kinds(self) -> list[str]:
        """Return the only kind."""
        return [self._kind]

    def stamps(self, kind: str) -> dict[int, str]:
        """Return step 0 if there is a file."""
        return {0: file_stamp(self.path)} if kind == self._kind and self.path.is_file() else {}

    def open(self, kind: str, step: int) -> IO[bytes]:
        """See `RolloutSource`."""
        if kind != self._kind or step != 0:
            raise FileNotFoundError(f"{self.path} has no rollouts {kind!r} of step {step}")
        return self.path.open("rb")


def _known(kind: str) -> rollout_store.Kind:
    if kind == "val":
        return "val"
    if kind == "step":
        return "step"
    raise FileNotFoundError(f"no kind of rollouts is called {kind!r}")
