"""Waiting, in plain code, for what a user's `async` code returns."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from rl_core.environments.messages import STACKS
from rl_core.user_code import is_own


class GatherRunner:
    """Runs calls side by side and waits for all of them. They share one event loop, which is kept because clients that
    the user's code keeps belong to it."""

    def __init__(self) -> None:
        self._runner: Any = None

    def __call__(self, calls: Callable[[], Sequence[Awaitable[Any]]]) -> list[Any]:
        """The results, in order.

        Args:
            calls: Makes the calls; called on the loop.
        """
        # a process whose environment is not async need not import it
        import asyncio

        async def gathered() -> list[Any]:
            return await asyncio.gather(*calls())

        if self._runner is None:
            self._runner = asyncio.Runner()
            _show_waits(lambda: asyncio.all_tasks(self._runner.get_loop()))
        results: list[Any] = self._runner.run(gathered())
        return results


def _show_waits(tasks: Callable[[], Iterable[Any]]) -> None:
    """Have the pool's question for where this process hangs also write where its tasks wait: their frames are not on
    the stack of any thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if not faulthandler.unregister(STACKS):  # type: ignore[func-returns-value]  # it returns whether it was registered
        return

    def write(_signal: int, _frame: FrameType | None) -> None:
        for task in tasks():
            frames = list(_frames(task.get_coro()))[::-1]
            if any(is_own(frame.f_code.co_filename) for frame in frames):
                os.write(2, "\n".join(("Task (most recent call first):", *map(_line, frames), "")).encode())
        os._exit(1)

    signal.signal(STACKS, write)
    # the stacks of threads come first, also if this thread never runs Python again
    faulthandler.register(STACKS, all_threads=True, chain=True)


def _frames(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits."""
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        yield frame
        awaited = awaited.cr_await


def _line(frame: FrameType) -> str:
    return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
