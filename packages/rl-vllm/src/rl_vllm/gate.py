"""Who may ask the engine, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_core.errors import GeneratorError


class Gate:
    """Lets requests in, keeps them waiting (paused, asleep) or turns them away (nothing fit to serve).

    Args:
        refusal: why nobody is let in yet.
    """

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal
        self.num_inside = 0
        self.num_waiting = 0
        self._paused = False
        self._held = False
        self._closed = False
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._open.set()
        self._empty.set()

    @asynccontextmanager
    async def passage(self, *, while_paused: bool = False) -> AsyncIterator[None]:
        """Be inside for the length of the block, waiting first where the gate is shut, or only where it is held.

        Raises:
            GeneratorError: where requests are turned away.
        """
        if not (self._open.is_set() or (while_paused and not self._held)):
            self.num_waiting += 1
            try:
                while not self._open.is_set():
                    await self._open.wait()
            finally:
                self.num_waiting -= 1
        if self.refusal:
            raise GeneratorError(f"the generator serves nothing: {self.refusal}")
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    async def pause(self) -> None:
        """Shut the gate until `resume`, and wait until nobody is inside."""
        self._paused = True
        self._update()
        await self._empty.wait()

    def resume(self) -> None:
        self._paused = False
        self._update()

    async def hold(self) -> None:
        """Shut the gate until `release`, and wait until nobody is inside."""
        self._held = True
        self._update()
        await self._empty.wait()

    def release(self) -> None:
        self._held = False
        self._update()

    def refuse(self, reason: str) -> None:
        """Turn everybody away, with a reason, until `serve`."""
        if not self._closed:
            self.refusal = reason

    def serve(self) -> None:
        """Turn nobody away any more."""
        if not self._closed:
            self.refusal = ""

    def close(self, reason: str) -> None:
        """Turn everybody away for good, those who wait included."""
        self.refusal = reason
        self._closed = True
        self._update()

    def _update(self) -> None:
        if self._closed or not (self._paused or self._held):
            self._open.set()
        else:
            self._open.clear()
