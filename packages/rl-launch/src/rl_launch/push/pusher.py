"""Pushes of a run's checkpoints, in a background thread, and of one checkpoint by `rl push`."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rl_core.errors import ConfigError, RLError, RunDirectoryError
from rl_launch.push.destinations import HubRepository, StoreFolder, destination_of
from rl_launch.push.staging import stage
from rl_launch.run_session.checkpoints.checkpoints import ADAPTER, STAGED, newest_checkpoint
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest
from rl_launch.run_session.config import CheckpointingConfig
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RunFolder

_log = logging.getLogger(__name__)

ATTEMPTS_AFTER_S = (2.0, 10.0, 30.0, 120.0)
"""Seconds before each further attempt of a push that failed."""

UNFINISHED_WAIT_S = 30.0
"""Seconds that a run which was interrupted waits for the push in progress."""


class Pusher:
    """Pushes checkpoints of a run to `checkpointing.push_to`. A failure is reported and never ends the run.

    The usage, by a run session::

        pusher.begin(run_dir)
        pusher.saved(step, checkpoint)      # returns at once
        pusher.end(is_finished=True, at_once=False)     # waits, and reports

    Args:
        config: Its `push_to` is set.
        destination: Where the checkpoints go.
        attempts_after_s: Seconds before each further attempt.
        unfinished_wait_s: Limit of the wait at the end of a run that is not finished.
    """

    def __init__(
        self,
        config: CheckpointingConfig,
        destination: HubRepository | StoreFolder,
        *,
        attempts_after_s: Sequence[float] = ATTEMPTS_AFTER_S,
        unfinished_wait_s: float = UNFINISHED_WAIT_S,
    ) -> None:
        self._config = config
        self._destination = destination
        self._attempts_after_s = attempts_after_s
        self._unfinished_wait_s = unfinished_wait_s
        self._run: RunFolder | None = None

    def begin(self, run_dir: Path) -> None:
        """Begin the pushes of a run, new or resumed."""
        self._run = RunFolder(run_dir)
        self._uploads = _Uploads(self._destination, self._attempts_after_s)

    def saved(self, step: int, checkpoint: Path) -> None:
        """Schedule a checkpoint for the push if it is one to push."""
        assert self._run is not None
        is_wanted = self._config.push_checkpoints == "every"
        if self._config.push_checkpoints == "best":
            try:
                best = self._run.best_checkpoint()
            except OSError as error:
                self._uploads.refuse(step, str(error))
                return
            is_wanted = best is not None and best.step == step
        if is_wanted:
            self._ask(self._run, step, checkpoint)

    def end(self, *, is_finished: bool, at_once: bool) -> None:
        """Push the last checkpoint if it is the one to push, wait for pushes in progress, and report.

        Args:
            is_finished: Whether the run has made all its steps or met its goal. One that will be resumed waits for a
                short time only, and its last checkpoint is not the last of the run.
            at_once: Whether to wait for nothing, as after a second Ctrl-C.
        """
        run, self._run = self._run, None
        if run is None:
            return
        if is_finished and self._config.push_checkpoints == "last":
            try:
                newest = newest_checkpoint(run.path)
                self._ask(run, int(newest.name.removeprefix("step_")), newest)
            except (OSError, RunDirectoryError) as error:
                _log.warning("nothing was pushed to %s: %s", self._destination.url, error)
        self._uploads.finish(0.0 if at_once else None if is_finished else self._unfinished_wait_s)
        if self._uploads.done:
            steps = ", ".join(map(str, self._uploads.done))
            _log.info("pushed to %s: step%s %s", self._destination.url, "s"[: len(self._uploads.done) > 1], steps)
        option = " --adapter" if self._config.push_adapter else ""
        for step, reason in self._uploads.left().items():
            command = f"rl push {run.path}:{step} {self._destination.url}{option}"
            _log.warning("step %d was not pushed (%s); push it by: %s", step, reason, command)

    def _ask(self, run: RunFolder, step: int, checkpoint: Path) -> None:
        folder, name = checkpoint.with_name(f".{checkpoint.name}{STAGED}"), self._destination.loadable_name
        try:
            stage(run, checkpoint, folder, adapter=self._config.push_adapter, name=name)
        except (OSError, ValueError, RLError) as error:
            self._uploads.refuse(step, str(error))
        else:
            self._uploads.add(step, folder)


class _Uploads:
    """Uploads one after another in a separate thread. The thread ends with the process, so that an upload that hangs
    does not keep it.

    Attributes:
        done: Steps that were pushed.

    Args:
        destination: Where the files go.
        attempts_after_s: Seconds before each further attempt.
    """

    def __init__(self, destination: HubRepository | StoreFolder, attempts_after_s: Sequence[float]) -> None:
        self._destination = destination
        self._attempts_after_s = attempts_after_s
        self._waiting: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_given_up = threading.Event()
        self._asked: list[int] = []
        self._failed: dict[int, str] = {}
        self.done: list[int] = []

    def add(self, step: int, folder: Path) -> None:
        """Upload the files of a folder, which is removed afterwards."""
        self._asked.append(step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="push", daemon=True)
            self._thread.start()
        self._waiting.put((step, folder))

    def refuse(self, step: int, reason: str) -> None:
        """Report a step that cannot be uploaded."""
        self._asked.append(step)
        self._fail(step, reason)

    def finish(self, timeout_s: float | None) -> None:
        """Wait for all uploads, whose number of attempts is limited; give up the uploads left after a time."""
        if self._thread is None:
            return
        self._waiting.put(None)
        if self.left() and timeout_s != 0:
            _log.info("waiting for pushes to %s", self._destination.url)
        self._thread.join(timeout_s)
        self._is_given_up.set()

    def left(self) -> dict[int, str]:
        """Return the steps that were not pushed, and why."""
        return {step: self._failed.get(step, "the run ended first") for step in self._asked if step not in self.done}

    def _work(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            step, folder = waiting
            started = time.monotonic()
            for wait_s in () if self._is_given_up.is_set() else (*self._attempts_after_s, None):
                try:
                    address = self._destination.upload(folder, step=step, title=f"Step {step}")
                except Exception as error:  # noqa: BLE001  # of any library of a store; a push must not cost the run
                    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                    if wait_s is None or self._destination.is_final(error) or self._is_given_up.is_set():
                        self._fail(step, said)
                        break
                    _log.warning("pushing step %d failed (%s); trying again in %.0f s", step, said, wait_s)
                    self._is_given_up.wait(wait_s)
                else:
                    self.done.append(step)
                    _log.info("pushed step %d to %s in %.1f s", step, address, time.monotonic() - started)
                    break
            shutil.rmtree(folder, ignore_errors=True)

    def _fail(self, step: int, reason: str) -> None:
        self._failed[step] = reason
        _log.warning("step %d was not pushed to %s: %s", step, self._destination.url, reason)


def push(source: str, url: str, *, adapter: bool, private: bool) -> str:
    """Push a checkpoint with a model card, and return its address.

    Args:
        source: The checkpoint, as `CheckpointName` reads it.
        url: `hf://OWNER/NAME`, or a folder as `s3://bucket/folder` or `file:///folder`.
        adapter: Push only the adapters.
        private: Whether a repository that is made on the hub is private.

    Raises:
        ConfigError: If the destination cannot be written to.
        RunDirectoryError: If there is no such checkpoint, or it is damaged.
    """
    try:
        destination = destination_of(url, private=private)
    except ValueError as error:
        raise ConfigError(f"URL: {error}") from None
    named = CheckpointName.parse(source) or CheckpointName(Path(source))
    run, checkpoint, adapter = RunFolder(named.run), named.checkpoint(), adapter or named.part == ADAPTER
    folder = checkpoint.with_name(f".{checkpoint.name}.push-{os.getpid()}")
    try:
        stage(run, checkpoint, folder, adapter=adapter, name=destination.loadable_name)
        destination.check()
        step = CheckpointManifest.read(checkpoint).step
        return destination.upload(folder, step=step, title=f"Step {step}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pusher_of(config: CheckpointingConfig) -> Pusher | None:
    """Return the pusher of a run, after its destination has been proved to be writable; None if it pushes nothing.

    Raises:
        ConfigError: If the destination cannot be written to, or needs a token or a library that is missing.
    """
    if config.push_to is None:
        return None
    destination = destination_of(
        config.push_to, private=config.push_private, by_step=config.push_checkpoints == "every"
    )
    try:
        destination.check()
    except ConfigError as error:
        raise ConfigError(f"checkpointing.push_to: {error}") from None
    return Pusher(config, destination)
