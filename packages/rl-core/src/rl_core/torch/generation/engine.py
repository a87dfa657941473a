"""The rows that a model of this process decodes, and the thread it does so in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from rl_core.errors import GeneratorError
from rl_core.torch.generation.decoder import Decoder
from rl_core.torch.generation.row import Row
from rl_core.torch.generation.step_thread import StepThread

Model = TypeVar("Model", bound=Decoder)
Result = TypeVar("Result")


class Engine(Generic[Model]):
    """Decodes rows in its own thread; everything that touches the model runs there, between two steps.

    Args:
        load: Makes the model, in the thread.
        num_threads: OpenMP threads of the thread.
    """

    def __init__(self, load: Callable[[], Model], num_threads: int) -> None:
        self._load = load
        self._thread = StepThread(self._loaded, num_threads)
        self._waiting: deque[Row] = deque()
        self.version = 0
        self.num_sampled = 0
        self.num_running = 0

    @property
    def model(self) -> Model:
        """The model, once loaded; touched only in the engine's thread."""
        return self._model

    @property
    def loaded(self) -> Future[None]:
        """Done once the model is loaded; holds the error if it cannot be."""
        return self._thread.loaded

    @property
    def failure(self) -> str | None:
        """Reason why nothing is decoded any longer; None while the engine works."""
        return self._thread.failure

    @property
    def num_waiting(self) -> int:
        """Number of requests that have no row yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin to load; `loaded` is set when it is done."""
        self._thread.start()

    def submit(self, rows: Sequence[Row]) -> None:
        """Decode these rows; each row's future is done when its completion is."""
        self._thread.post(lambda: self._waiting.extend(rows))

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run a function between two steps."""
        return self._thread.call(function)

    def close(self) -> None:
        """End the thread; rows under way fail."""
        self._thread.close()

    @property
    def busy(self) -> bool:
        """Return whether rows wait or are under way."""
        return bool(self._model.rows or self._waiting)

    def step(self) -> None:
        """Take waiting rows in, and decode a token of each row; in the thread."""
        self._model.drop_cancelled()
        self.num_sampled += self._model.admit(self._waiting, self.version)
        if self._model.rows:
            self.num_running = len(self._model.rows)
            self.num_sampled += self._model.step(self.version)
        self.num_running = len(self._model.rows)

    def interrupt(self) -> None:
        """End all rows with the tokens that they have; in the thread."""
        for row in self._take_out_all():
            row.interrupt()

    def fail(self, reason: str) -> None:
        """Fail all rows; in the thread."""
        for row in self._take_out_all():
            if not row.future.done() and row.future.set_running_or_notify_cancel():
                row.future.set_exception(GeneratorError(reason))

    def dispose(self) -> None:
        """Release the model; called in the thread."""
        self._model.close()

    def _take_out_all(self) -> list[Row]:
        self.num_running = 0
        rows = [*self._model.clear(), *self._waiting]
        self._waiting.clear()
        return rows

    def _loaded(self) -> Engine[Model]:
        self._model = self._load()
        return self
