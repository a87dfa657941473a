"""The thread of an in-process engine: steps while there is work, calls in between, one end for all."""

import asyncio
import queue
import threading
from concurrent.futures import Future

import pytest
import torch

from rl_core.errors import GeneratorError
from rl_core.torch.generation import step_thread
from rl_core.torch.generation.step_thread import StepThread


class Counter:
    """Work of a given number of steps, for each of which it writes down its thread."""

    def __init__(self) -> None:
        self.left = 0
        self.steps: list[str] = []
        self.waiting: list[Future] = []
        self.disposed = False
        self.breaks = False

    @property
    def busy(self) -> bool:
        return self.left > 0

    def add(self, count: int) -> Future:
        self.left += count
        self.waiting.append(Future())
        return self.waiting[-1]

    def step(self) -> None:
        if self.breaks:
            raise ArithmeticError("out of order")
        self.steps.append(threading.current_thread().name)
        self.left -= 1
        if not self.left:
            for future in self.waiting:
                future.set_result(len(self.steps))
            self.waiting.clear()

    def fail(self, reason: str) -> None:
        for future in self.waiting:
            future.set_exception(GeneratorError(reason))

    def dispose(self) -> None:
        self.disposed = True


@pytest.fixture
def work():
    return Counter()


@pytest.fixture
def thread(work):
    thread = StepThread(lambda: work, num_threads=1)
    thread.start()
    thread.loaded.result(10)
    yield thread
    thread.close()


def test_it_steps_while_there_is_work_in_the_thread_that_loaded_it(thread, work):
    assert thread.call(lambda: work.add(3)).result(10).result(10) == 3
    assert work.steps == ["generator"] * 3
    assert thread.call(torch.get_num_threads).result(10) == 1
    assert thread.call(lambda: work.add(2)).result(10).result(10) == 5


def test_a_call_that_raises_fails_alone(thread, work):
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0).result(10)
    assert thread.call(lambda: work.add(1)).result(10).result(10) == 1


def test_an_iterator_that_ends_in_a_call_is_told_to_who_awaits_it(thread):
    async def ended() -> None:
        await asyncio.wrap_future(thread.call(lambda: next(iter(()))))

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(ended(), 10))


def test_a_step_that_raises_ends_all_with_its_reason(thread, work):
    work.breaks = True
    under_way = thread.call(lambda: work.add(1)).result(10)
    with pytest.raises(GeneratorError, match="the engine died: ArithmeticError: out of order"):
        under_way.result(10)
    with pytest.raises(GeneratorError, match="the engine died"):
        thread.call(lambda: None)
    thread.close()
    assert work.disposed


def test_what_is_under_way_at_the_end_is_told_so(work):
    thread = StepThread(lambda: work, num_threads=1)
    thread.start()
    thread.loaded.result(10)
    gate = threading.Event()
    held = thread.call(lambda: gate.wait(10))
    late = Future()
    closing = threading.Thread(target=thread.close)
    thread.post(lambda: late.set_result(work.add(10**9)))
    closing.start()
    gate.set()
    assert held.result(10)
    with pytest.raises(GeneratorError, match="the generator is closed"):
        late.result(10).result(10)
    closing.join(10)
    assert work.disposed


def test_what_does_not_load_is_told_to_whoever_waits():
    def load():
        raise ValueError("no such model")

    thread = StepThread(load, num_threads=1)
    thread.start()
    with pytest.raises(ValueError, match="no such model"):
        thread.loaded.result(10)
    with pytest.raises(GeneratorError, match="did not start: ValueError: no such model"):
        thread.call(lambda: None)
    thread.close()


class LateQueue:
    """A queue that takes the next item in only when the thread has ended, or waits to end."""

    def __init__(self, thread):
        self._thread = thread
        self._items = queue.SimpleQueue()
        self.get = self._items.get
        self.empty = self._items.empty

    def put(self, item):
        if item is not None:
            self._items.put(None)
            self._thread._thread.join(1)
        self._items.put(item)


def test_a_call_that_meets_the_end_of_the_thread_is_answered(work):
    thread = StepThread(lambda: work, num_threads=1)
    thread._calls = LateQueue(thread)
    thread.start()
    thread.loaded.result(10)
    assert thread.call(lambda: "answered").result(10) == "answered"
    thread.close()
    with pytest.raises(GeneratorError, match="the generator is closed"):
        thread.call(lambda: None)


def test_nothing_can_be_asked_for_before_the_engine_is_loaded(work):
    gate = threading.Event()
    thread = StepThread(lambda: gate.wait(10) and work, num_threads=1)
    thread.start()
    with pytest.raises(GeneratorError, match="not loaded"):
        thread.call(lambda: None)
    gate.set()
    thread.loaded.result(10)
    assert thread.call(lambda: 1).result(10) == 1
    thread.close()


def test_a_step_that_hangs_holds_up_no_close(work, monkeypatch, caplog):
    monkeypatch.setattr(step_thread, "CLOSE_TIMEOUT_S", 0.05)
    hung = threading.Event()
    work.step = lambda: hung.wait(60)
    thread = StepThread(lambda: work, num_threads=1)
    thread.start()
    thread.loaded.result(10)
    thread.call(lambda: work.add(1)).result(10)
    thread.close()
    assert "did not end" in caplog.text
    work.left = 0
    hung.set()
    thread._thread.join(10)
    assert not thread._thread.is_alive()
