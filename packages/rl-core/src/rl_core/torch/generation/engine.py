"""The thread in which a generator's model is run."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from rl_core.errors import GeneratorError
from rl_core.torch.generation.decoder import Decoder
from rl_core.torch.generation.row import Row

Model = TypeVar("Model", bound=Decoder)
Result = TypeVar("Result")


class Engine(Generic[Model]):
    """Decodes rows in a thread of its own; everything that touches the model runs there, between two steps.

    Args:
        load: makes the model, in the thread.
        num_threads: OpenMP threads of the thread.
    """

    def __init__(self, load: Callable[[], Model], num_threads: int) -> None:
        self._load = load
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[Sequence[Row] | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self.loaded: Future[None] = Future()
        self.failure: str | None = None
        self.version = 0
        self.num_sampled = 0
        self.num_running = 0

    @property
    def model(self) -> Model:
        """The model, once loaded; touched in the engine's thread alone."""
        return self._model

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to load; `loaded` says when it is done."""
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> None:
        """Decode these rows; each row's future is done when its completion is."""
        self._put(rows)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - becomes the failure of whoever waits
                future.set_exception(error)

        self._put(run)
        return future

    def close(self) -> None:
        """End the thread; rows under way fail."""
        if self._thread.ident is not None:
            self._inbox.put(None)
            self._thread.join()

    def _put(self, item: Sequence[Row] | Callable[[], None]) -> None:
        if self.failure is not None:
            raise GeneratorError(self.failure)
        self._inbox.put(item)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            self._model = self._load()
        except BaseException as error:  # noqa: BLE001 - becomes the failure of start
            self.failure = f"the engine did not start: {type(error).__name__}: {error}"
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(None)
        try:
            self._serve(self._model)
            self.failure = "the generator is closed"
        except BaseException as error:  # noqa: BLE001 - becomes the failure of every request
            self.failure = f"the engine died: {type(error).__name__}: {error}"
        self._fail_all(self._model)
        self._model.close()

    def _serve(self, model: Model) -> None:
        while self._take_in(block=not model.rows and not self._waiting):
            model.drop_cancelled()
            self.num_sampled += model.admit(self._waiting, self.version)
            if model.rows:
                self.num_running = len(model.rows)
                self.num_sampled += model.step(self.version)
            self.num_running = len(model.rows)

    def _take_in(self, *, block: bool) -> bool:
        """Take what has come in; False where the end has."""
        while block or not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            if callable(item):
                item()
            else:
                self._waiting.extend(item)
            block = False
        return True

    def _fail_all(self, model: Model) -> None:
        self.num_running = 0
        rows = [*model.clear(), *self._waiting]
        self._waiting.clear()
        while not self._inbox.empty():
            item = self._inbox.get()
            if callable(item):
                item()
            elif item is not None:
                rows.extend(item)
        for row in rows:
            if not row.future.done() and row.future.set_running_or_notify_cancel():
                row.future.set_exception(GeneratorError(str(self.failure)))
