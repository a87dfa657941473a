"""Waiting, in plain code, for what a user's `async` code returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any


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
        results: list[Any] = self._runner.run(gathered())
        return results
