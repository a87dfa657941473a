"""The thread that runs a model of this process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import torch

from rl_core.errors import GeneratorError


class Stepped(Protocol):
    """Work that is done in steps; called by one thread."""

    @property
    def busy(self) -> bool:
        """Return whether there is work for another step."""

    def step(self) -> None:
        """Do a part of the work."""

    def fail(self, reason: str) -> None:
        """Fail what is under way: no step follows."""

    def dispose(self) -> None:
        """Release what outlives the object."""


_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 20.0
"""Timeout in seconds of the wait of `close` for a step under way."""

Work = TypeVar("Work", bound=Stepped)
Result = TypeVar("Result")


class StepThread(Generic[Work]):
    """Steps for as long as there is work; everything that touches it runs in this thread too, between two steps.

    Args:
        load: Makes what is stepped, in the thread.
        num_threads: OpenMP threads of the thread.

    Attributes:
        start: Begins to load; `loaded` is set when it is done.
        loaded: Done when the work is loaded; holds the error if it cannot be.
        failure: Reason why no step follows any more; None before.
    """

    def __init__(self, load: Callable[[], Work], num_threads: int) -> None:
        self._load = load
        self._num_threads = num_threads
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self.start = self._thread.start
        self._ending = threading.Lock()
        self.loaded: Future[None] = Future()
        self.failure: str | None = None

    def post(self, function: Callable[[], None]) -> None:
        """Run a function, which raises nothing, between two steps.

        Raises:
            GeneratorError: If the engine is not loaded, or the thread has ended.
        """
        if not self.loaded.done():
            raise GeneratorError("the engine is not loaded yet")
        with self._ending:  # a function that is put in here is taken out by the thread before it ends
            if self.failure is not None:
                raise GeneratorError(self.failure)
            self._calls.put(function)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps, and return the future of its result."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except StopIteration as error:  # A future of asyncio does not take it, so that nobody would hear of it.
                future.set_exception(RuntimeError(f"StopIteration: {error}"))
            except BaseException as error:  # noqa: BLE001 - becomes the failure of whoever waits
                future.set_exception(error)

        self.post(run)
        return future

    def close(self) -> None:
        """End the thread; work under way fails. A step that hangs cannot be ended: its thread is left behind after
        `CLOSE_TIMEOUT_S` and ends with the process.
        """
        if self._thread.ident is not None:
            self._calls.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("the engine's step did not end within %g s; its thread is left behind", CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            work = self._load()
        except BaseException as error:  # noqa: BLE001 - becomes the failure of start
            self._end(f"the engine did not start: {type(error).__name__}: {error}")
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(None)
        try:
            reason = "the generator is closed"
            while True:
                # Functions run between two steps; without work the thread waits for the next one.
                is_closed, waits = False, not work.busy
                while not is_closed and (waits or not self._calls.empty()):
                    function = self._calls.get()
                    is_closed, waits = function is None, False
                    if function is not None:
                        function()
                    del function  # it may hold the tensors of an update, and the thread may sleep now
                if is_closed:
                    break
                if work.busy:
                    work.step()
        except BaseException as error:  # noqa: BLE001 - becomes the failure of everything that is asked for
            reason = f"the engine died: {type(error).__name__}: {error}"
            _log.error("the engine died", exc_info=error)
        self._end(reason)
        while not self._calls.empty():  # what they ask for fails with the rest
            if function := self._calls.get():
                function()
        work.fail(reason)
        work.dispose()

    def _end(self, reason: str) -> None:
        """Refuse further functions."""
        with self._ending:
            self.failure = reason
