"""Limits of the requests to an endpoint, and the tokens that a run has spent.

A request counts from the moment it is sent until 60 seconds after its end. The endpoint counts it at some moment in
between, so that no window of 60 seconds there can have more than the limit, however long requests travel.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from rl_algos.judges.config import JudgeLimitsConfig
from rl_core.rollouts.judging import JudgeBudgetSpent

WINDOW_S = 60.0
"""Length of the window of the limits by minute."""


class JudgeClock:
    """Time in seconds.

    Args:
        speed: Seconds that pass in a second of the machine; tests let it run faster.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.monotonic() * self.speed

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds / self.speed)

    async def wait(self, event: asyncio.Event, seconds: float) -> None:
        """Wait for an event, at most for some time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds / self.speed if math.isfinite(seconds) else None):
                await event.wait()


class SpentTokens:
    """The tokens that each judge of a run has spent, counted in a file.

    Tokens are written before a request is sent, as many as it may take, and again when they are known. A process that
    is killed in between has spent them all, so that no kill makes room for more than the budget.

    Args:
        file: The file, which one process writes; None to count in memory.

    Raises:
        OSError: If the file cannot be read or written.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._total: dict[str, int] = {}
        self._next = 0
        if file is None:
            return
        lines: dict[tuple[str, int], int] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            # A process that was killed may have written a part of its last line, and has not sent that request.
            with suppress(ValueError, TypeError):
                judge, number, tokens = json.loads(line)
                lines[judge, number] = tokens
        for (judge, _), tokens in lines.items():
            self._total[judge] = self._total.get(judge, 0) + tokens
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8") as new:
            new.writelines(json.dumps([judge, 0, tokens]) + "\n" for judge, tokens in self._total.items())
        Path(new.name).replace(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)

    def of(self, judge: str) -> int:
        """Return the tokens that a judge has spent, including tokens that requests in progress may take."""
        return self._total.get(judge, 0)

    def reserve(self, judge: str, tokens: int) -> int:
        """Count the tokens that a request may take; returns its number."""
        self._next += 1
        self.settle(judge, self._next, 0, tokens)
        return self._next

    def settle(self, judge: str, number: int, reserved: int, tokens: int) -> None:
        """Count the tokens that a request has taken instead of the reserved ones."""
        if self._file is not None:
            os.write(self._descriptor, (json.dumps([judge, number, tokens]) + "\n").encode())
        self._total[judge] = self.of(judge) + tokens - reserved

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._descriptor)


@dataclass
class SentRequest:
    """A request that was admitted.

    Args:
        tokens: Tokens that it takes: an upper bound until they are known.
    """

    tokens: int


class RequestLimits:
    """Admits the requests to one endpoint in order, each as soon as the limits and the budget allow it.

    Args:
        judge: Name of the judge.
        limits: Its limits.
        spent: Tokens that the run has spent.
        clock: Time of the windows.
    """

    def __init__(self, judge: str, limits: JudgeLimitsConfig, spent: SpentTokens, clock: JudgeClock) -> None:
        self._judge, self._limits, self._spent, self._clock = judge, limits, spent, clock
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()
        self._in_progress: dict[int, SentRequest] = {}
        self._recent: deque[tuple[float, int]] = deque()  # Times until which ended requests count, and their tokens.
        self._paused_until = -math.inf

    def pause(self, seconds: float) -> None:
        """Admit nothing for some time, because the endpoint has asked for it."""
        self._paused_until = max(self._paused_until, self._clock.now() + seconds)

    @asynccontextmanager
    async def admitted(self, tokens: int) -> AsyncIterator[SentRequest]:
        """Wait until a request may be sent, and count it while the block runs and for a minute after it.

        Args:
            tokens: Maximum number of tokens that it may take. The block sets the true number on the request.

        Raises:
            JudgeBudgetSpent: If the budget does not have so many tokens left.
        """
        async with self._turn:
            # Only the request whose turn it is waits here, so that requests are admitted in order.
            while wait_s := self._wait_s(tokens):
                self._ended.clear()
                await self._clock.wait(self._ended, wait_s)
            number = self._spent.reserve(self._judge, tokens)
            request = self._in_progress[number] = SentRequest(tokens)
        try:
            yield request
        finally:
            del self._in_progress[number]
            self._spent.settle(self._judge, number, tokens, request.tokens)
            self._recent.append((self._clock.now() + WINDOW_S, request.tokens))
            self._ended.set()

    def _wait_s(self, tokens: int) -> float:
        """Return the seconds until a request may be sent as far as known, 0 if it may be sent; an end may come before.

        Raises:
            JudgeBudgetSpent: If waiting does not help.
        """
        limits, now = self._limits, self._clock.now()
        while self._recent and self._recent[0][0] <= now:
            self._recent.popleft()
        budget = limits.max_total_tokens
        if budget is not None and self._spent.of(self._judge) + tokens > budget:
            if self._in_progress:
                return math.inf  # They may take fewer tokens than are reserved for them.
            key = f"judges.{self._judge}.limits.max_total_tokens"
            raise JudgeBudgetSpent(
                f"{key}: {self._spent.of(self._judge)} of {budget} tokens are spent, and the next question may take "
                f"{tokens}. Set a larger number and resume the run"
            )
        if self._paused_until > now:
            return self._paused_until - now
        if len(self._in_progress) >= limits.concurrent:
            return math.inf
        next_s = self._recent[0][0] - now if self._recent else math.inf
        num_requests, num_tokens = len(self._in_progress) + len(self._recent), tokens
        num_tokens += sum(each.tokens for each in self._in_progress.values()) + sum(taken for _, taken in self._recent)
        if limits.requests_per_minute is not None and num_requests >= limits.requests_per_minute:
            return next_s
        if limits.tokens_per_minute is not None and num_tokens > limits.tokens_per_minute:
            return next_s
        return 0.0
