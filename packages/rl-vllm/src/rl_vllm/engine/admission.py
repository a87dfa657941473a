"""Admission of requests to the engine: served, kept waiting or refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from rl_core.errors import GeneratorError

INTERRUPT_AGAIN_S = 0.05
"""Timeout in seconds of the wait for requests to end before the engine is asked again to end them."""


class Admission:
    """Admits requests, keeps them waiting (paused, asleep) or refuses them (no weights fit to serve).

    Args:
        refusal: Why no request is admitted yet.
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
        """Count as a request in flight for the length of the block.

        Waits first while admission is paused or held; with `while_paused` only while it is held.

        Raises:
            GeneratorError: If requests are refused.
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

    async def pause(self, interrupt: Callable[[], Awaitable[None]] | None = None) -> None:
        """Admit nothing until `resume`, and wait for the requests in flight.

        Args:
            interrupt: Ends the requests that the engine has; called until none is in flight, as some may be on their
                way into the engine. None lets them finish.
        """
        self._paused = True
        self._update()
        while interrupt is not None and not self._empty.is_set():
            await interrupt()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), INTERRUPT_AGAIN_S)
        await self._empty.wait()

    def resume(self) -> None:
        self._paused = False
        self._update()

    async def hold(self) -> None:
        """Admit nothing until `release`, and wait for the requests in flight."""
        self._held = True
        self._update()
        await self._empty.wait()

    def release(self) -> None:
        self._held = False
        self._update()

    def refuse(self, reason: str) -> None:
        """Refuse every request, with a reason, until `serve`."""
        if not self._closed:
            self.refusal = reason

    def serve(self) -> None:
        """Refuse requests no longer."""
        if not self._closed:
            self.refusal = ""

    def close(self, reason: str) -> None:
        """Refuse every request for good, those that wait included."""
        self.refusal = reason
        self._closed = True
        self._update()

    def _update(self) -> None:
        if self._closed or not (self._paused or self._held):
            self._open.set()
        else:
            self._open.clear()
