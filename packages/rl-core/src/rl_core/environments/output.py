"""Text that an environment's process prints, on its way to the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections import deque

logger = logging.getLogger(__name__)

MAX_LINE = 2000
"""Most characters of a line that are logged."""
MAX_BYTES = 2**20
"""Most bytes of one process that are logged; the rest is read and dropped."""
TAIL_LINES = 200
"""Lines kept to explain the end of a process, its stacks among them."""

_FRAME = re.compile(r'\s*File "([^"]*)", line (\d+) in (.*)')


class Output(asyncio.Protocol):
    """Logs each line that a process writes to its standard output or error, up to a bound.

    Args:
        pid: of the process, which begins each line in the log.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._rest = b""
        self._num_bytes = 0
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._closed = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def read_from(cls, descriptor: int, pid: int) -> Output:
        """Read a pipe's end until the process closes the other, or `close`."""
        loop = asyncio.get_running_loop()
        _, output = await loop.connect_read_pipe(lambda: cls(pid), os.fdopen(descriptor, "rb", buffering=0))
        return output

    @property
    def last_line(self) -> str:
        """The last line that says something, shortened."""
        return next((line.strip()[:200] for line in reversed(self._lines) if line.strip()), "")

    @property
    def tail(self) -> str:
        """The last lines."""
        return "\n".join(self._lines)

    @property
    def innermost_frame(self) -> str:
        """Where the process was when it wrote its stacks; empty if it did not."""
        innermost = ""
        begins = False
        for line in self._lines:
            found = _FRAME.match(line)
            if begins and found:
                innermost = f"{found[3]} ({os.path.basename(found[1])}:{found[2]})"
            begins = "most recent call first" in line
        return innermost

    async def ended(self, timeout_s: float) -> None:
        """Wait until everything has been read; what the process started may keep the pipe open for longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._closed)

    def close(self) -> None:
        """Read no more."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._log(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._log(self._rest)
        if not self._closed.done():
            self._closed.set_result(None)

    def _log(self, line: bytes) -> None:
        text = line[: 4 * MAX_LINE].decode(errors="replace")[:MAX_LINE].rstrip()
        self._lines.append(text)
        if self._num_bytes > MAX_BYTES:
            return
        self._num_bytes += len(line)
        if self._num_bytes > MAX_BYTES:
            logger.warning("process %d has printed more than %d MiB; the rest is dropped", self._pid, MAX_BYTES >> 20)
        elif text:
            logger.info("process %d: %s", self._pid, text)
