"""Completions that a person types, or that are in a file."""

from __future__ import annotations

import asyncio
import os

END = "."
"""A line with nothing else ends a completion; the last one may end with the input."""

_BYTES = 2**16


class CompletionInput:
    """Completions from a descriptor: a terminal, a pipe or a file. Each has any number of lines.

    Args:
        descriptor: Open for reading.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False

    async def next(self) -> str | None:
        """The next completion without its last line break; None at the end of the input.

        Other work goes on while it waits, and it may be cancelled.
        """
        lines: list[str] = []
        while (line := await self._line()) is not None:
            if line == END:
                return "\n".join(lines)
            lines.append(line)
        return "\n".join(lines) if lines else None

    async def _line(self) -> str | None:
        while b"\n" not in self._rest and not self._ended:
            await self._readable()
            found = os.read(self._descriptor, _BYTES)
            self._rest += found
            self._ended = not found
        line, _, rest = self._rest.partition(b"\n")
        if not line and not rest and self._ended and not self._rest:
            return None
        self._rest = rest
        return line.decode(errors="replace").rstrip("\r")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:
            # a file is always readable, and cannot be waited for
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
