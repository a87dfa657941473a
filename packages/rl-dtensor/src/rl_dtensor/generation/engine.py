"""The model of a Hugging Face generator and the thread that runs it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from rl_core.errors import GeneratorError
from rl_dtensor.generation.batch import DecodingBatch
from rl_dtensor.generation.config import HFConfig
from rl_dtensor.generation.row import Row

Result = TypeVar("Result")


class Engine:
    """Decodes rows in a thread of its own; everything that touches the model runs there, between two steps.

    Args:
        load: makes the model, in the thread.
        num_threads: OpenMP threads of the thread.
    """

    def __init__(
        self, load: Callable[[], PreTrainedModel], config: HFConfig, device: torch.device, num_threads: int
    ) -> None:
        self._load = load
        self._config = config
        self._device = device
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[Sequence[Row] | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque()
        self._thread = threading.Thread(target=self._run, name="hf-generator", daemon=True)
        self.loaded: Future[None] = Future()
        self.failure: str | None = None
        self.version = 0
        self.num_sampled = 0
        self.num_running = 0

    @property
    def model(self) -> PreTrainedModel:
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
        batch = DecodingBatch(self._model, self._device)
        try:
            self._serve(batch)
            self.failure = "the generator is closed"
        except BaseException as error:  # noqa: BLE001 - becomes the failure of every request
            self.failure = f"the engine died: {type(error).__name__}: {error}"
        self._fail_all(batch)

    def _serve(self, batch: DecodingBatch) -> None:
        while self._take_in(block=not batch.rows and not self._waiting):
            batch.drop_cancelled()
            self._admit(batch)
            if batch.rows:
                self.num_running = len(batch.rows)
                self.num_sampled += len(batch.rows)
                batch.step(self.version)
            self.num_running = len(batch.rows)

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

    def _admit(self, batch: DecodingBatch) -> None:
        """Give waiting rows, in order, the free places of the batch."""
        while self._waiting and len(batch.rows) < self._config.max_batch_size:
            joining: list[Row] = []
            longest = 0
            while self._waiting and len(batch.rows) + len(joining) < self._config.max_batch_size:
                row = self._waiting[0]
                padded = max(longest, row.num_prompt_tokens) * (len(joining) + 1)
                if joining and padded > self._config.max_prefill_tokens:
                    break
                self._waiting.popleft()
                if row.future.cancelled():
                    continue
                joining.append(row)
                longest = max(longest, row.num_prompt_tokens)
            if joining:
                self.num_sampled += len(joining)
                batch.join(joining, self.version)

    def _fail_all(self, batch: DecodingBatch) -> None:
        self.num_running = 0
        rows = [*batch.clear(), *self._waiting]
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
