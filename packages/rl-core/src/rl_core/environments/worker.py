"""Workers of an `EnvironmentPool`, each with a process that is replaced if it hangs or ends, and their turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from rl_core.environments.child import Child, ChildSpec
from rl_core.environments.messages import Answer
from rl_core.errors import EnvironmentTimeout, RLError, WorkerDied
from rl_core.rollouts.environment import EnvironmentFailure, Fault, KeptState, StepResult

logger = logging.getLogger(__name__)

PATIENCE_SHARE = 0.1
"""Share of the deadline that a turn may take before it gives way to others that wait."""
PATIENCE_FACTOR = 4.0
"""Multiple of the slowest recent turn that a turn may take before it gives way, if that is longer."""


class Worker:
    """One process, the turns of conversations whose states it has, and the task that serves them.

    Args:
        spec: Description of the process.
        backlog: Turns that it shares with other workers.
        deadline_s: Timeout of a call in seconds.
        max_batch: Maximum number of conversations in a call.

    Attributes:
        num_restarts: Number of processes that were replaced because they hung or ended.
        restarted_at, restart_reason: Time and reason of the last restart.
        broken: The reason that the environment could not be built when last tried.
    """

    def __init__(self, spec: ChildSpec, backlog: Backlog, *, deadline_s: float, max_batch: int) -> None:
        self._spec = spec
        self._backlog = backlog
        self._deadline_s = deadline_s
        self._max_batch = max_batch
        self._own: deque[QueuedTurn] = deque()
        self._abandoned: list[str] = []
        self._stateful: dict[str, Home] = {}
        self._num_beginning = 0
        self._num_closing = 0
        self._process: Child | None = None
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_restarts = 0
        self.restarted_at, self.restart_reason = -math.inf, ""
        self.broken: RLError | None = None

    @property
    def num_states(self) -> int:
        """Conversations whose states its process has."""
        return len(self._stateful)

    @property
    def num_open(self) -> int:
        """Conversations in progress: in a call, or with a state that is not closed yet."""
        return len(self._stateful) + len(self._abandoned) + self._num_beginning + self._num_closing

    @property
    def num_queued(self) -> int:
        """Turns that wait for this worker."""
        return len(self._own)

    @property
    def alive(self) -> bool:
        """Return whether its process runs."""
        return self._process is not None and self._process.is_running

    @property
    def idle(self) -> bool:
        """Return whether it has nothing to do."""
        return self._task is None or self._task.done()

    async def start(self) -> Child:
        """Return the process, started if it is not running."""
        async with self._starting:
            if self._process is None:
                try:
                    self._process = await Child.start(self._spec)
                    self.broken = None
                except RLError as error:
                    self.broken = error
                    raise
            return self._process

    def submit(self, turn: QueuedTurn) -> None:
        """Queue a turn of a conversation whose state is here."""
        self._own.append(turn)
        self.wake()

    def abandon(self, id: str) -> None:
        """Close the state of a conversation that will not continue."""
        self._stateful.pop(id, None)
        self._abandoned.append(id)
        self.wake()

    def wake(self) -> None:
        """Look for something to do."""
        if self.idle:
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def close(self) -> None:
        """End the process and fail what is queued here."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        fail_all(self._own, RuntimeError("the environment pool is closed"))
        self._own.clear()
        async with self._starting:
            if self._process is not None:
                await self._process.close()
                self._process = None

    async def _serve(self) -> None:
        """Work off the queue; ends when nothing is left, and is started again by the next turn."""
        batch: list[QueuedTurn] = []
        try:
            while True:
                if self._process is not None and not self.alive:
                    await self._replace(self._process, await self._process.how_it_ended())
                if self._abandoned:
                    await self._close_states()
                self._backlog.note_room()
                if not (batch := self._take()):
                    break
                await self._step(await self.start(), batch)
                self._num_beginning = 0
                self._backlog.running_suspects.difference_update(batch)
        except asyncio.CancelledError:
            fail_all(batch, RuntimeError("the environment pool is closed"))
            raise
        except Exception as error:  # noqa: BLE001 - it is raised in the callers that wait
            # The processes of other workers would not start either.
            self._num_beginning = 0
            fail_all([*batch, *self._own, *self._backlog.drain()], error)
            self._own.clear()
            self._backlog.running_suspects.difference_update(batch)

    def _take(self) -> list[QueuedTurn]:
        """Take the turns of the next call: of conversations whose states are here, else of the backlog."""
        while True:
            if self._own:
                batch = [self._own.popleft() for _ in range(min(len(self._own), self._max_batch))]
            else:
                batch = self._backlog.take(self._max_batch)
            wanted = []
            for turn in batch:
                if turn.outcome.done():
                    continue
                if turn.home.lost:
                    self._settle(turn, Answer(EnvironmentFailure(turn.home.lost, "lost")))
                elif turn.home.abandoned:
                    self._settle(turn, Answer(EnvironmentFailure("abandoned before its turn")))
                else:
                    wanted.append(turn)
            if wanted or not batch:
                self._num_beginning = sum(turn.home.worker is None for turn in wanted)
                return wanted
            self._backlog.running_suspects.difference_update(batch)

    async def _step(self, process: Child, batch: list[QueuedTurn]) -> None:
        begin = time.monotonic()
        fault: Fault | None = None
        try:
            answers = await self._answers(process, batch)
        except (EnvironmentTimeout, WorkerDied) as error:
            await self._replace(process, str(error), spare={turn.id for turn in batch})
            shared = f", in a call that {len(batch)} conversations shared" if len(batch) > 1 else ""
            fault = "deadline" if isinstance(error, EnvironmentTimeout) else "process"
            answers = [Answer(EnvironmentFailure(f"{error}{shared}", fault), retry=True) for _ in batch]
        else:
            self._backlog.note_duration(time.monotonic() - begin)
        if answers is None:
            logger.info("requeued a slow turn and restarted its process so that other turns can run")
            await process.kill()
            self._process = None
            self._backlog.add_suspect(batch[0])
            return
        # A process that has answered other conversations may be out of memory because of those.
        spent = next((answer.result for answer in answers if answer.out_of_memory), None)
        shares_blame = len(batch) > 1 or (spent is not None and process.num_calls > 1)
        if isinstance(spent, EnvironmentFailure):
            await self._replace(process, spent.reason, spare={turn.id for turn in batch})
        again = []
        for turn, answer in zip(batch, answers, strict=True):
            # A turn can be repeated if its conversation had no state before it, or a saved one.
            can_repeat = turn.home.worker is None or turn.home.saved is not None
            if not answer.retry or not can_repeat or turn.outcome.done():
                self._settle(turn, answer)
                continue
            if shares_blame and not turn.alone:
                turn.alone = True
            elif fault == "process" and process.saves and not turn.has_resumed:
                turn.has_resumed = True
            elif turn.retries:
                turn.retries -= 1
            else:
                self._settle(turn, answer)
                continue
            turn.home.worker = None
            self._stateful.pop(turn.id, None)
            again.append(turn)
        self._backlog.add(again, first=True)

    async def _answers(self, process: Child, batch: list[QueuedTurn]) -> list[Answer] | None:
        """Return the process's answers; None if a single turn is to give way to others."""
        homes = [turn.home for turn in batch]
        # No process has these states, so the environment restores them from their bytes.
        saved = {i: home.saved for i, home in enumerate(homes) if home.worker is None and home.saved is not None}
        request = process.request(("step", [turn.payload for turn in batch], saved), self._deadline_s)
        if len(batch) > 1 or batch[0].suspected_at is not None or self._stateful:
            # Its blame is not known, it gave way before, or it would take states with it: it may use its deadline.
            answers: list[Answer] = await request
            return answers
        answered = asyncio.ensure_future(request)
        others_wait: asyncio.Future[None] | None = None
        try:
            await asyncio.wait({answered}, timeout=self._backlog.patience_s)
            # A call that waits for a judge does not hang, and its questions would be asked again.
            if not answered.done() and not process.has_asked:
                others_wait = asyncio.ensure_future(self._backlog.others_wait())
                await asyncio.wait({answered, others_wait}, return_when=asyncio.FIRST_COMPLETED)
            if process.has_asked:
                await answered
            return answered.result() if answered.done() else None
        finally:
            for future in (answered, others_wait):
                if future is not None:
                    future.cancel()

    async def _close_states(self) -> None:
        ids, self._abandoned = self._abandoned, []
        if self._process is None:
            return
        self._num_closing = len(ids)
        try:
            problem = await self._process.request(("abandon", ids), self._deadline_s)
            if problem is not None:
                logger.warning("%s", problem)
        except (EnvironmentTimeout, WorkerDied) as error:
            await self._replace(self._process, f"while closing states, {error}")
        finally:
            self._num_closing = 0

    def _settle(self, turn: QueuedTurn, answer: Answer) -> None:
        home, result = turn.home, answer.result
        if answer.has_state and home.abandoned:
            self._abandoned.append(turn.id)
        elif answer.has_state:
            home.worker, home.saved = self, answer.saved
            self._stateful[turn.id] = home
        else:
            home.worker = home.saved = None
            self._stateful.pop(turn.id, None)
        if answer.has_state and isinstance(result, StepResult):
            result = replace(result, state=KeptState(answer.saved))
        if not turn.outcome.done():
            turn.outcome.set_result(result)

    async def _replace(self, process: Child, reason: str, spare: Collection[str] = ()) -> None:
        """End a process that hangs or is dead; the next call starts another. Conversations whose states it had resume
        there from their saved states, or are lost; those being stepped are left as they are.
        """
        await process.kill()
        self._process = None
        self.num_restarts += 1
        self.restarted_at, self.restart_reason = time.monotonic(), reason
        others = [home for id, home in self._stateful.items() if id not in spare]
        num_lost = sum(home.saved is None for home in others)
        for home in others:
            home.worker = None
            if home.saved is None:
                home.lost = f"state lost with its environment's process: {reason}"
        self._stateful.clear()
        self._abandoned.clear()
        logger.warning(
            "environment process restarts (%d more conversations lose their state, %d resume from a saved state): %s",
            num_lost,
            len(others) - num_lost,
            reason,
        )


@dataclass(eq=False, slots=True)
class Home:
    """A conversation as the pool knows it.

    Args:
        client: Its owner.
        worker: The one whose process has its state; None if it has no state, or the process is gone.
        saved: The state as bytes; None if it has none, or none that was saved.
        busy: True if a turn of it is queued or under way.
        abandoned: True if its client has given it up.
        lost: The reason that its state is gone; empty if it is not.
    """

    client: str
    worker: Worker | None = None
    saved: bytes | None = None
    busy: bool = False
    abandoned: bool = False
    lost: str = ""


@dataclass(eq=False, slots=True)
class QueuedTurn:
    """One conversation's turn on its way to a process.

    Args:
        id: Id of the conversation.
        payload: The conversation, pickled.
        home: Home of the conversation.
        outcome: Future of its outcome; it is done if nobody waits for it.
        retries: Number of times that it may still be tried again after its own failure.
        alone: True if it is tried again, in a call without others, after a failure that it may not be to blame for.
        suspected_at: Time when it gave way to others (`time.monotonic`); None if it has not.
        has_resumed: True if it is tried again because its process ended, which may have had other causes.
    """

    id: str
    payload: bytes
    home: Home
    outcome: asyncio.Future[StepResult | EnvironmentFailure]
    retries: int = 0
    alone: bool = False
    suspected_at: float | None = None
    has_resumed: bool = False


class Backlog:
    """Turns that any worker may take, because their conversations have no state in a process.

    A turn that runs for much longer than others do is suspected to hang. If others wait, it gives way to them: its
    process is replaced, and it runs again, up to the deadline, when they have had their turn. So turns that pass the
    deadline delay the others by a tenth of it at most.

    Args:
        deadline_s: Timeout of a call in seconds.
        num_workers: Number of workers that take turns from here.
        wake: Called when there is something to take.
        room: Returns how many conversations may begin in addition to those in progress; None for no bound.

    Attributes:
        running_suspects: Turns that gave way and run again now; the worker takes out those of its call when it ends.
    """

    def __init__(
        self, *, deadline_s: float, num_workers: int, wake: Callable[[], None], room: Callable[[], int] | None = None
    ) -> None:
        self._deadline_s = deadline_s
        self._room = room
        self._max_suspects = max(1, num_workers - 1)
        self._wake = wake
        self._fresh: deque[QueuedTurn] = deque()
        self._suspects: deque[QueuedTurn] = deque()
        self.running_suspects: set[QueuedTurn] = set()
        self._slowest_s = 0.0
        self._has_fresh = asyncio.Event()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._suspects)

    @property
    def patience_s(self) -> float:
        """Seconds that a turn may run before it gives way."""
        return max(PATIENCE_SHARE * self._deadline_s, PATIENCE_FACTOR * self._slowest_s)

    def note_duration(self, seconds: float) -> None:
        """Learn from a call that was answered."""
        self._slowest_s = max(seconds, 0.95 * self._slowest_s)

    def add(self, turns: Sequence[QueuedTurn], *, first: bool = False) -> None:
        """Queue turns, `first` before all others."""
        if first:
            self._fresh.extendleft(reversed(turns))
        else:
            self._fresh.extend(turns)
        if self._fresh:
            self._wake()
            self._has_fresh.set()

    def add_suspect(self, turn: QueuedTurn) -> None:
        """Queue a turn that gave way."""
        turn.suspected_at = time.monotonic()
        self._suspects.append(turn)
        self._wake()

    def take(self, limit: int) -> list[QueuedTurn]:
        """Take the turns of the next call: several, or one that must run alone; empty if there is none, or no room for
        one.
        """
        if self._room is not None:
            limit = min(limit, self._room())
        if limit < 1:
            return []
        if self._suspects and (not self._fresh or self._is_overdue(self._suspects[0])):
            suspect = self._suspects.popleft()
            self.running_suspects.add(suspect)
            return [suspect]
        batch: list[QueuedTurn] = []
        while self._fresh and len(batch) < limit and not (batch and self._fresh[0].alone):
            batch.append(self._fresh.popleft())
            if batch[-1].alone:
                break
        if not self._fresh:
            self._has_fresh.clear()
        return batch

    def note_room(self) -> None:
        """Make idle workers poll again, because a conversation that others waited for may have ended."""
        if self._room is not None and len(self) and self._room() > 0:
            self._wake()

    async def others_wait(self) -> None:
        """Return when turns that nobody suspects wait for a worker."""
        # An idle worker takes them before the caller here continues.
        while not self._fresh:
            await self._has_fresh.wait()

    def drain(self) -> list[QueuedTurn]:
        """Take everything that is queued."""
        turns = [*self._fresh, *self._suspects]
        self._fresh.clear()
        self._suspects.clear()
        self._has_fresh.clear()
        return turns

    def _is_overdue(self, suspect: QueuedTurn) -> bool:
        assert suspect.suspected_at is not None
        waited = time.monotonic() - suspect.suspected_at
        return waited > self._deadline_s and len(self.running_suspects) < self._max_suspects


def fail_all(turns: Iterable[QueuedTurn], error: Exception) -> None:
    """Raise an error in the callers that wait for these turns."""
    for turn in turns:
        if not turn.outcome.done():
            turn.outcome.set_exception(error)
