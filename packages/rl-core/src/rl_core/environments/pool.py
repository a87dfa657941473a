"""Environments in processes of their own, so that one that hangs or crashes costs a rollout and not the run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_core.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.environments.process import LENGTH, Abandon, Answer, Build, Close, Step
from rl_core.errors import EnvironmentTimeout, RLError, WorkerDied, WorkerError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""Most seconds that importing and building an environment may take."""
CLOSE_TIMEOUT_S = 5.0
"""Most seconds that closing the states may take before a process is killed."""


class EnvironmentPool:
    """Runs one environment in `num_workers` processes; to be used from one event loop.

    A conversation goes to the process with the least to do and sticks to it until it is done; its state stays there.
    What is queued for a process is sent as one batched call. Where such a call raises, crashes or passes the deadline,
    its conversations that have no state are tried again one by one, so that only those to blame fail; those with a
    state fail, as their state may be half stepped or lost. The processes end with the one that holds the pool, however
    that ends.

    Args:
        environment: `"package.module:Class"`, built as `Class(config)` in each process, or a scoring function as
            `as_environment` takes it; imported nowhere else.
        config: its settings, picklable.
        num_workers: number of processes.
        deadline_s: most seconds of a batched call; the process that passes it is replaced.
        max_batch: most conversations of a batched call.
    """

    def __init__(
        self, environment: str, config: Any, *, num_workers: int, deadline_s: float, max_batch: int = 64
    ) -> None:
        if num_workers < 1 or max_batch < 1 or not deadline_s > 0:
            raise ValueError(
                "num_workers, max_batch and deadline_s must be positive, "
                f"got {num_workers}, {max_batch} and {deadline_s}"
            )
        build = Build(environment, pickle.dumps(config))
        self._workers = [_Worker(build, deadline_s=deadline_s, max_batch=max_batch) for _ in range(num_workers)]
        self._homes: dict[str, _Home] = {}
        self._closed = False

    async def start(self) -> None:
        """Start every process and build the environment there; otherwise the first `step` does.

        Raises:
            WorkerError: what importing or building the environment raised there.
            WorkerDied: where a process ended or hung before the environment was built.
        """
        self._require_open()
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def step(self, conversations: Sequence[Conversation]) -> list[StepResult | EnvironmentFailure]:
        """One outcome per conversation, in order; the `state` of a result is None, as it stays in its process.

        One that is done or failed is forgotten. One past its first turn that the pool does not know fails: it belongs
        to a pool that died, and its state died with it.

        Raises:
            ValueError: where a conversation is being stepped already.
            WorkerError, WorkerDied: as `start`, where an environment cannot be built.
        """
        self._require_open()
        call = _Call(len(conversations), asyncio.get_running_loop().create_future())
        items = self._admit(conversations, call)
        for item in items:
            item.home.worker.submit(item)
        try:
            outcomes = await call.outcomes()
        except BaseException:
            self._forget([conversation.id for conversation in conversations])
            raise
        for item, outcome in zip(items, outcomes, strict=True):
            item.home.busy = False
            ended = isinstance(outcome, EnvironmentFailure) or outcome.done
            if ended and self._homes.get(item.id) is item.home:
                del self._homes[item.id]
        return outcomes

    async def abandon(self, ids: Iterable[str]) -> None:
        """Forget these conversations, and see that their states are closed; unknown ones are ignored."""
        self._forget(ids)

    async def health(self) -> Mapping[str, Any]:
        """Numbers worth logging: processes alive, restarts so far, conversations known and queued.

        Raises:
            WorkerError, WorkerDied: where the environment could not be built when last tried.
        """
        for worker in self._workers:
            if worker.broken is not None:
                raise worker.broken
        return {
            "num_workers": len(self._workers),
            "num_alive": sum(worker.alive for worker in self._workers),
            "num_restarts": sum(worker.num_restarts for worker in self._workers),
            "num_conversations": len(self._homes),
            "num_queued": sum(worker.num_queued for worker in self._workers),
        }

    async def close(self) -> None:
        """Close all states and end all processes; calls under way fail. May be called again."""
        self._closed = True
        self._homes.clear()
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _forget(self, ids: Iterable[str]) -> None:
        for id in ids:
            home = self._homes.pop(id, None)
            if home is not None:
                home.worker.abandon(id, home)

    def _admit(self, conversations: Sequence[Conversation], call: _Call) -> list[_Item]:
        ids = [conversation.id for conversation in conversations]
        twice = {id for id in ids if (home := self._homes.get(id)) is not None and home.busy}
        if twice or len(set(ids)) < len(ids):
            raise ValueError(
                "a conversation can take one step at a time; being stepped already, or named twice: "
                f"{sorted(twice or {id for id in ids if ids.count(id) > 1})}"
            )
        payloads = [pickle.dumps(conversation, protocol=pickle.HIGHEST_PROTOCOL) for conversation in conversations]
        items = []
        for index, (conversation, payload) in enumerate(zip(conversations, payloads, strict=True)):
            home = self._homes.get(conversation.id)
            if home is None:
                lost = "its environment was started again and its state is lost" if conversation.turn else ""
                home = self._homes[conversation.id] = _Home(min(self._workers, key=_Worker.load), lost=lost)
            home.busy = True
            items.append(_Item(conversation.id, payload, home, call, index))
            home.worker.num_pending += 1
        return items

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the environment pool is closed")


class _Call:
    """One `step` call and the outcomes it waits for."""

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
        self._outcomes[index] = outcome
        self._missing -= 1
        if not self._missing and not self._future.done():
            self._future.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    async def outcomes(self) -> list[StepResult | EnvironmentFailure]:
        await self._future
        return [outcome for outcome in self._outcomes if outcome is not None]


@dataclass(eq=False, slots=True)
class _Home:
    """Where a conversation lives."""

    worker: _Worker
    busy: bool = False
    has_state: bool = False
    abandoned: bool = False
    lost: str = ""


@dataclass(eq=False, slots=True)
class _Item:
    """One conversation's turn on its way to a process."""

    id: str
    payload: bytes
    home: _Home
    call: _Call
    index: int
    alone: bool = False


class _Worker:
    """One process, its queue and the task that serves it."""

    def __init__(self, build: Build, *, deadline_s: float, max_batch: int) -> None:
        self._build = build
        self._deadline_s = deadline_s
        self._max_batch = max_batch
        self._queue: deque[_Item] = deque()
        self._abandoned: list[str] = []
        self._stateful: dict[str, _Home] = {}
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.num_pending = 0
        self.num_restarts = 0
        self.broken: RLError | None = None

    def load(self) -> tuple[int, int]:
        """What a new conversation is weighed by: turns queued or under way, then states kept."""
        return self.num_pending, len(self._stateful)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def start(self) -> _Process:
        """The process, started where it is not running."""
        async with self._starting:
            if self._process is None:
                try:
                    self._process = await _Process.start(self._build)
                    self.broken = None
                except RLError as error:
                    self.broken = error
                    raise
            return self._process

    def submit(self, item: _Item) -> None:
        self._queue.append(item)
        self._wake()

    def abandon(self, id: str, home: _Home) -> None:
        home.abandoned = True
        if self._stateful.pop(id, None) is not None or home.busy:
            self._abandoned.append(id)
            self._wake()

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        closed = RuntimeError("the environment pool is closed")
        for item in self._queue:
            item.call.fail(closed)
        self._queue.clear()
        async with self._starting:
            if self._process is not None:
                await self._process.close()
                self._process = None

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Work off the queue; ends when nothing is left, and is started again by what comes next."""
        batch: list[_Item] = []
        try:
            while self._queue or self._abandoned:
                if self._process is not None and not self.alive:
                    await self._replace(self._process, await self._process.how_it_ended())
                if self._abandoned:
                    await self._close_states()
                if batch := self._take():
                    await self._step(await self.start(), batch)
                batch = []
        except asyncio.CancelledError:
            self._fail(batch, RuntimeError("the environment pool is closed"))
            raise
        except Exception as error:  # noqa: BLE001  # those who wait are told
            self._fail([*batch, *self._queue], error)
            self._queue.clear()

    def _fail(self, items: Sequence[_Item], error: Exception) -> None:
        self.num_pending -= len(items)
        for item in items:
            item.call.fail(error)

    def _take(self) -> list[_Item]:
        """The next batch: first come first served, what is to be tried alone by itself."""
        batch: list[_Item] = []
        while self._queue and len(batch) < self._max_batch:
            item = self._queue[0]
            if batch and item.alone:
                break
            self._queue.popleft()
            if item.call.over:
                self.num_pending -= 1
            elif item.home.abandoned or item.home.lost:
                self._settle(item, EnvironmentFailure(item.home.lost or "abandoned before its turn"))
            else:
                batch.append(item)
                if item.alone:
                    break
        return batch

    async def _step(self, process: _Process, batch: list[_Item]) -> None:
        try:
            answers = await process.request(Step([item.payload for item in batch]), self._deadline_s)
        except (EnvironmentTimeout, WorkerDied) as error:
            reason = str(error)
            await self._replace(process, reason, spare={item.id for item in batch})
            if len(batch) > 1:
                reason += f", in a call that {len(batch)} conversations shared"
            answers = [Answer(EnvironmentFailure(reason), retry=not item.home.has_state) for item in batch]
        again = []
        for item, answer in zip(batch, answers, strict=True):
            if answer.retry and len(batch) > 1 and not item.call.over:
                item.alone = True
                again.append(item)
            else:
                self._settle(item, answer.result, has_state=answer.has_state)
        self._queue.extendleft(reversed(again))

    async def _close_states(self) -> None:
        ids, self._abandoned = self._abandoned, []
        if self._process is None:
            return
        try:
            problem = await self._process.request(Abandon(ids), self._deadline_s)
        except (EnvironmentTimeout, WorkerDied) as error:
            await self._replace(self._process, f"while closing states, {error}")
        else:
            if problem is not None:
                logger.warning("%s", problem)

    def _settle(self, item: _Item, outcome: StepResult | EnvironmentFailure, *, has_state: bool = False) -> None:
        self.num_pending -= 1
        item.home.has_state = has_state
        if has_state and not item.home.abandoned:
            self._stateful[item.id] = item.home
        else:
            self._stateful.pop(item.id, None)
        item.call.settle(item.index, outcome)

    async def _replace(self, process: _Process, reason: str, spare: Collection[str] = ()) -> None:
        """End a process that hangs or is dead, and its states but those being stepped; the next call starts another."""
        await process.kill()
        self._process = None
        self.num_restarts += 1
        lost = {id: home for id, home in self._stateful.items() if id not in spare}
        for home in lost.values():
            home.lost = f"state lost with its environment's process: {reason}"
        self._stateful.clear()
        logger.warning("environment process restarts (%d more conversations lose their state): %s", len(lost), reason)


@dataclass(eq=False)
class _Process:
    """A running process and the stream to it."""

    name: str
    popen: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    lifeline: int
    closed: bool = field(default=False)

    @classmethod
    async def start(cls, build: Build) -> _Process:
        """Start a process and build the environment in it."""
        near, far = socket.socketpair()
        watched, lifeline = os.pipe()
        # a plain child rather than multiprocessing's: nothing of this process's main module is imported there
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rl_core.environments.process import main; main({far.fileno()}, {watched})"
        )
        popen = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[far.fileno(), watched],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        far.close()
        os.close(watched)
        reader, writer = await asyncio.open_connection(sock=near, limit=2**20)
        process = cls(build.environment, popen, reader, writer, lifeline)
        try:
            problem = await process.request(build, START_TIMEOUT_S)
        except BaseException as error:
            await process.kill()
            if isinstance(error, EnvironmentTimeout):
                raise WorkerDied(
                    f"environment {build.environment} was not built within {START_TIMEOUT_S:g} s"
                ) from None
            raise
        if problem is not None:
            await process.kill()
            assert isinstance(problem, WorkerError)
            raise problem
        return process

    @property
    def returncode(self) -> int | None:
        return self.popen.poll()

    async def request(self, message: Any, deadline_s: float) -> Any:
        """The answer to a message.

        Raises:
            EnvironmentTimeout: where it does not come within the deadline.
            WorkerDied: where the process ended.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._write(message)
                header = await self.reader.readexactly(LENGTH.size)
                return pickle.loads(await self.reader.readexactly(*LENGTH.unpack(header)))
        except TimeoutError:
            raise EnvironmentTimeout(
                f"environment {self.name} gave no answer within its deadline of {deadline_s:g} s"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(f"the process of environment {self.name} ended: {await self.how_it_ended()}") from None

    async def close(self) -> None:
        """Let it close its states and end; kill it where that takes too long."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._write(Close())
                await self.reader.read()
        await self.kill()

    async def kill(self) -> None:
        """End it and what it started."""
        if self.closed:
            return
        self.closed = True
        self.writer.close()
        os.close(self.lifeline)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        await asyncio.to_thread(self.popen.wait)

    async def _write(self, message: Any) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self.writer.write(LENGTH.pack(len(data)) + data)
        await self.writer.drain()

    async def how_it_ended(self) -> str:
        """The exit code or signal of a process whose stream has closed."""
        # the stream closes a moment before the process can be waited for
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.popen.wait, 5.0)
        code = self.popen.returncode
        if code is None:
            return "it closed its stream"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
