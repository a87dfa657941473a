"""An HTTP server that strangers can neither stop nor fill a log with.

A connection that sends no request, or not all of its headers, is closed after `IDLE_S`, and earlier if there are too
many connections: the one that has waited longest makes room, so that open connections without a request shut nobody
out. What cannot be read as HTTP is answered, counted and logged at most once a minute.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

_log = logging.getLogger(__name__)

IDLE_S = 30.0
"""Maximum number of seconds for which a connection waits without a complete request."""

TRANSFER_S = 30.0
"""Maximum number of seconds for receiving the body of a request, and for sending a part of an answer."""

MAX_CONNECTIONS = 16_384
"""Maximum number of connections, if the limit of open files allows it."""

_LOG_PERIOD_S = 60.0

_COLLECTIONS = (20_000, 20, 20)
"""Thresholds of the garbage collector. With Python's own (700, 10, 10) a few thousand open requests are visited again
and again, which halts the event loop for a tenth of a second each time."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Refuse = Callable[[int, str], web.StreamResponse]


def collect_rarely() -> None:
    """Let garbage collections leave what exists alone, and happen rarely: they halt all requests."""
    gc.freeze()
    gc.set_threshold(*_COLLECTIONS)


class BodyTooLarge(Exception):
    """The body of a request is larger than allowed."""


async def receive(request: web.BaseRequest, max_bytes: int) -> bytearray:
    """Return the body of a request.

    Args:
        request: Request whose body has not been read.
        max_bytes: Maximum number of bytes.

    Raises:
        BodyTooLarge: If it has more.
        TimeoutError: If it does not arrive within `TRANSFER_S`.
    """
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge
    body = bytearray()  # `request.read` would keep the body until the next request of the connection.
    try:
        async with asyncio.timeout(TRANSFER_S):
            async for part in request.content.iter_any():
                body += part
                if len(body) > max_bytes:
                    raise BodyTooLarge
    except TimeoutError:
        raise TimeoutError(f"the request did not arrive within {TRANSFER_S:g} s") from None
    return body


async def within_limit(sending: Awaitable[Any]) -> None:
    """Send a part of an answer.

    Raises:
        ConnectionResetError: If the client does not read it within `TRANSFER_S`.
    """
    try:
        async with asyncio.timeout(TRANSFER_S):
            await sending
    except TimeoutError:
        raise ConnectionResetError(f"the client has not read its answer for {TRANSFER_S:g} s") from None


class SparingLog:
    """Logs events that strangers cause: the first, and then their number, at most once a minute.

    Args:
        log: Logger of the warnings.
        event: Sentence about the events, with `%d` for their number and `%s` for the cause of the last.
    """

    def __init__(self, log: logging.Logger, event: str) -> None:
        self._log = log
        self._event = event
        self._num_events = 0
        self._next_s = 0.0

    def note(self, cause: str, error: BaseException | None = None) -> None:
        """Count an event.

        Args:
            cause: Cause, in words that the stranger has not chosen.
            error: Exception whose traceback is logged; None for none.
        """
        self._num_events += 1
        now = time.monotonic()
        if now >= self._next_s:
            self._log.warning(self._event, self._num_events, cause, exc_info=error)
            self._num_events, self._next_s = 0, now + _LOG_PERIOD_S


class Pace:
    """Spreads work over the passes of an event loop, so that many requests at once do not halt everything else.

    Work begins in a pass for `budget_s`. More of it waits for the next pass, in order.

    Args:
        budget_s: Seconds of one pass.
    """

    def __init__(self, budget_s: float = 0.01) -> None:
        self._budget_s = budget_s
        self._begun_s: float | None = None

    async def turn(self) -> None:
        """Wait until the pass has time for another piece of work."""
        while True:
            now = time.perf_counter()
            if self._begun_s is None:
                self._begun_s = now
                asyncio.get_running_loop().call_soon(self._end)  # This runs in the next pass.
            if now - self._begun_s < self._budget_s:
                return
            await asyncio.sleep(0)

    def _end(self) -> None:
        self._begun_s = None


class Connections(web.Server):
    """The connections of a server.

    Args:
        serve: Answers a request.
        refuse: Makes the answer to an invalid request, from a status and a message.
        limit: Maximum number of connections; by default half of the files that the process may open.
        encodings: Encodings of bodies that `serve` decodes itself, with a bound.

    Attributes:
        pace: Spreads requests over the passes of the event loop.
    """

    def __init__(
        self, serve: Handler, refuse: Refuse, *, limit: int | None = None, encodings: tuple[str, ...] = ()
    ) -> None:
        super().__init__(self._handle, handler_cancellation=True)
        self.refuse = refuse
        self.pace = Pace()
        self.unread = SparingLog(_log, "%d requests could not be read as HTTP, the last one because of %s")
        self._serve = serve
        self._encodings = ("identity", *encodings)
        self._limit = limit or min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._num_open = 0
        self._waiting: dict[web.RequestHandler, float] = {}  # Times at which they began to wait, in this order.
        self._closing_idle: asyncio.TimerHandle | None = None

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        times = {"keepalive_timeout": 2 * IDLE_S, "lingering_time": IDLE_S / 3}
        # A small body could unpack to any size, so it is not decompressed.
        return _Connection(self, loop=asyncio.get_running_loop(), access_log=None, auto_decompress=False, **times)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Count a connection, and close the one that has waited longest if there are too many."""
        super().connection_made(handler, transport)
        self._num_open += 1
        self._wait(handler)
        if self._num_open > self._limit:
            self._close(next(iter(self._waiting)))

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        super().connection_lost(handler, exc)
        self._num_open -= 1
        self._waiting.pop(handler, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        self._waiting.pop(handler, None)
        try:
            await self.pace.turn()
            if request.headers.get("Content-Encoding", "identity") not in self._encodings:
                allowed = "".join(f" or with {encoding}" for encoding in self._encodings[1:])
                return self.refuse(415, f"the body of a request must be sent without Content-Encoding{allowed}")
            return await self._serve(request)
        finally:
            if handler.transport is not None:
                self._wait(handler)

    def _wait(self, handler: web.RequestHandler) -> None:
        self._waiting[handler] = time.monotonic()
        if self._closing_idle is None:
            self._closing_idle = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        self._closing_idle = None
        now = time.monotonic()
        for handler in [each for each, since in self._waiting.items() if now - since >= IDLE_S]:
            self._close(handler)
        if self._waiting:
            left = IDLE_S - (now - next(iter(self._waiting.values())))
            self._closing_idle = asyncio.get_running_loop().call_later(max(left, 1.0), self._close_idle)

    def _close(self, handler: web.RequestHandler) -> None:
        self._waiting.pop(handler, None)
        if isinstance(handler.transport, asyncio.Transport):
            handler.transport.abort()


class _Connection(web.RequestHandler):
    """The protocol of one connection, with errors in the form of the server."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(connections, **settings)
        self._connections = connections

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that is not HTTP."""
        cause = type(exc).__name__
        self._connections.unread.note(cause)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        response = self._connections.refuse(status, f"the request is not valid HTTP ({cause})")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Count what aiohttp would log with a traceback."""
        self._connections.unread.note(type(kwargs.get("exc_info")).__name__)
