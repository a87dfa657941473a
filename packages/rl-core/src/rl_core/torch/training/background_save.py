"""Checkpoints that are written while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rl_core.errors import RLError
from rl_core.model import SavedFile

WRITE_TIMEOUT = timedelta(hours=2)
"""Longest time that a rank may take beyond the others to write its part."""

_log = logging.getLogger(__name__)


class BackgroundSave:
    """This rank's part of a checkpoint that a thread writes, one checkpoint at a time.

    The threads of the ranks talk over their own process group, so that what they say never mixes with the
    collectives of training.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[tuple[SavedFile, ...]] | None = None
        self._path = Path()
        self._files: tuple[SavedFile, ...] = ()

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, on gloo, only for writing; made by the first use, which is collective."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        return self._group

    def begin(self, path: Path, write: Callable[[], tuple[SavedFile, ...]], *, wait: bool) -> None:
        """Write a checkpoint, the one before it being finished.

        Args:
            path: Path, for messages.
            write: Returns the files it has written.
            wait: Write at once, in the calling thread.
        """
        self._files = ()
        if wait:
            self._files = write()
            return
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing, self._path = thread.submit(write), path
        thread.shutdown(wait=False)

    def finish(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """The files that this rank wrote for the last checkpoint, None while it is being written; without `wait` no
        collective.

        Raises:
            RLError: If it could not be written, once.
        """
        if self._writing is None:
            return self._files
        if not wait and not self._writing.done():
            return None
        writing, self._writing = self._writing, None
        with plain_errors(self._path, "written"):
            self._files = writing.result()
        return self._files

    def close(self) -> None:
        """Wait for what is being written; its failure goes to the log."""
        if self._writing is not None:
            wait_for([self._writing])
            if (error := self._writing.exception()) is not None:
                _log.warning("the checkpoint at %s was not written: %s", self._path, error)


@contextmanager
def plain_errors(path: Path, done: Literal["written", "read"]) -> Iterator[None]:
    """Raise one line with the reason why a checkpoint was not written or read. torch's own error is not an `Exception`
    and would end threads and actors.

    Raises:
        RLError: For an `OSError`, and for errors of torch's distributed checkpoint.
    """
    try:
        yield
    except OSError as error:
        raise RLError(f"the checkpoint at {path} was not {done}: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RLError(
            f"the checkpoint at {path} was not {done}: rank {rank}: {type(cause).__name__}: {cause}"
        ) from error
