"""Turns of conversations on their way to an environment's processes, and the queue that those share."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.environment import EnvironmentFailure, StepResult

if TYPE_CHECKING:
    from rl_core.environments.worker import Worker

PATIENCE_SHARE = 0.1
"""Share of the deadline that a turn has before it gives way to others that wait."""
PATIENCE_FACTOR = 4.0
"""How many times as long as the slowest recent turn it has, if that is more."""


class Call:
    """One `step` call of a pool and the outcomes it waits for."""

    def __init__(self, size: int, future: asyncio.Future[None]) -> None:
        self._outcomes: list[StepResult | EnvironmentFailure | None] = [None] * size
        self._missing = size
        self._future = future
        if not size:
            future.set_result(None)

    @property
    def over(self) -> bool:
        """Whether nobody waits any more."""
        return self._future.done()

    def settle(self, index: int, outcome: StepResult | EnvironmentFailure) -> None:
        """Fill in one outcome."""
        self._outcomes[index] = outcome
        self._missing -= 1
        if not self._missing and not self._future.done():
            self._future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise an error in whoever waits."""
        if not self._future.done():
            self._future.set_exception(error)

    async def outcomes(self) -> list[StepResult | EnvironmentFailure]:
        """All outcomes, in order."""
        await self._future
        return [outcome for outcome in self._outcomes if outcome is not None]


@dataclass(eq=False, slots=True)
class Home:
    """A conversation as the pool knows it.

    Args:
        client: whose it is.
        worker: the one whose process has its state; None if it has no state.
        busy: whether a turn of it is queued or under way.
        abandoned: whether its client has given it up.
        lost: why its state is gone, if it is.
    """

    client: str
    worker: Worker | None = None
    busy: bool = False
    abandoned: bool = False
    lost: str = ""


@dataclass(eq=False, slots=True)
class Turn:
    """One conversation's turn on its way to a process.

    Args:
        id: of the conversation.
        payload: the conversation, pickled.
        home: of the conversation.
        call, index: whom the outcome is for.
        alone: whether it is tried again, by itself, after a failure that it may not be to blame for.
        suspected_at: when it gave way to others (`time.monotonic`); None if it has not.
    """

    id: str
    payload: bytes
    home: Home
    call: Call
    index: int
    alone: bool = False
    suspected_at: float | None = None


class Backlog:
    """Turns that any worker may take: those of conversations without a state.

    A turn that runs for much longer than others do is suspected to hang. If others wait, it gives way to them: its
    process is replaced, and it runs again, up to the deadline, when they have had their turn. So turns that pass the
    deadline delay the others by a tenth of it at most.

    Args:
        deadline_s: most seconds of a call.
        num_workers: how many take turns from here.
        wake: called when there is something to take.
    """

    def __init__(self, *, deadline_s: float, num_workers: int, wake: Callable[[], None]) -> None:
        self._deadline_s = deadline_s
        self._most_suspects = max(1, num_workers - 1)
        self._wake = wake
        self._fresh: deque[Turn] = deque()
        self._suspects: deque[Turn] = deque()
        self._running_suspects: set[Turn] = set()
        self._slowest_s = 0.0
        self._has_fresh = asyncio.Event()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._suspects)

    @property
    def patience_s(self) -> float:
        """How long a turn may run before it gives way."""
        return max(PATIENCE_SHARE * self._deadline_s, PATIENCE_FACTOR * self._slowest_s)

    def note_duration(self, seconds: float) -> None:
        """Learn from a call that was answered."""
        self._slowest_s = max(seconds, 0.95 * self._slowest_s)

    def add(self, turns: Sequence[Turn]) -> None:
        """Queue turns."""
        self._fresh.extend(turns)
        self._note_fresh()

    def add_first(self, turns: Sequence[Turn]) -> None:
        """Queue turns before all others."""
        self._fresh.extendleft(reversed(turns))
        self._note_fresh()

    def add_suspect(self, turn: Turn) -> None:
        """Queue a turn that gave way."""
        turn.suspected_at = time.monotonic()
        self._suspects.append(turn)
        self._wake()

    def take(self, most: int) -> list[Turn]:
        """Take the turns of the next call: several, or one that is to run by itself; empty if there is none."""
        if self._suspects and (not self._fresh or self._is_overdue(self._suspects[0])):
            suspect = self._suspects.popleft()
            self._running_suspects.add(suspect)
            return [suspect]
        batch: list[Turn] = []
        while self._fresh and len(batch) < most and not (batch and self._fresh[0].alone):
            batch.append(self._fresh.popleft())
            if batch[-1].alone:
                break
        if not self._fresh:
            self._has_fresh.clear()
        return batch

    def done(self, turns: Iterable[Turn]) -> None:
        """Note that turns which were taken are no longer under way."""
        self._running_suspects.difference_update(turns)

    async def others_wait(self) -> None:
        """Return when turns that nobody suspects wait for a worker."""
        # a worker that is idle takes them before whoever waits here runs on
        while not self._fresh:
            await self._has_fresh.wait()

    def drain(self) -> list[Turn]:
        """Take everything that is queued."""
        turns = [*self._fresh, *self._suspects]
        self._fresh.clear()
        self._suspects.clear()
        self._has_fresh.clear()
        return turns

    def _note_fresh(self) -> None:
        if self._fresh:
            self._wake()
            self._has_fresh.set()

    def _is_overdue(self, suspect: Turn) -> bool:
        assert suspect.suspected_at is not None
        waited = time.monotonic() - suspect.suspected_at
        return waited > self._deadline_s and len(self._running_suspects) < self._most_suspects


def fail_all(turns: Iterable[Turn], error: Exception) -> None:
    """Raise an error in whoever waits for these turns."""
    for turn in turns:
        turn.call.fail(error)
