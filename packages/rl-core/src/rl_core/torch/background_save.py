"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import RLError

WRITE_TIMEOUT = timedelta(hours=2)
"""How much longer than the others a rank may take to write its part."""

_log = logging.getLogger(__name__)


class BackgroundSave:
    """This rank's part of a checkpoint that a thread writes, one checkpoint at a time.

    The threads of the ranks talk over a process group of their own, so that what they say never mixes with the
    collectives of training.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[Any] | None = None
        self._path = Path()

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, on gloo, for the threads alone; made by the first use, which is collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        return self._group

    def begin(self, writing: Future[Any], path: Path) -> None:
        """Keep what stands for the write of a checkpoint to `path`, the one before it being finished."""
        self._writing, self._path = writing, path

    def finish(self, *, wait: bool = True) -> bool:
        """Whether nothing is being written any more; without `wait` no collective.

        Raises:
            RLError: where it could not be written, once.
        """
        if self._writing is None:
            return True
        if not wait and not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        with unwritten_is_told(self._path):
            writing.result()
        return True

    def close(self) -> None:
        """Wait for what is being written; its failure goes to the log."""
        if self._writing is not None:
            wait([self._writing])
            if (error := self._writing.exception()) is not None:
                _log.warning("the checkpoint at %s was not written: %s", self._path, error)


@contextmanager
def unwritten_is_told(path: Path) -> Iterator[None]:
    """Say in a line why a checkpoint was not written: torch's own error is no `Exception`, so that it would end threads
    and actors.

    Raises:
        RLError: for an `OSError`, and for what torch's distributed checkpoint raises.
    """
    try:
        yield
    except OSError as error:
        raise RLError(f"the checkpoint at {path} was not written: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RLError(
            f"the checkpoint at {path} was not written: rank {rank}: {type(cause).__name__}: {cause}"
        ) from error
