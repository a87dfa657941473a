"""Environments in their own processes, so that one that hangs or crashes costs a rollout and not the run."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_core.environments.child import ChildSpec
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.rewards import RewardSum
from rl_core.environments.worker import Backlog, Home, QueuedTurn, Worker, fail_all
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.rollouts.judging import JudgeClient
from rl_core.tracing import spans
from rl_core.user_code import FromFile

logger = logging.getLogger(__name__)

MAX_DEFAULT_WORKERS = 8
"""Maximum number of processes of an environment whose settings leave the number open."""
LEASE_S = 600.0
"""Seconds that a client may be silent; its process may be busy loading an engine."""
RENEW_S = LEASE_S / 10
"""Seconds between two renewals of a client's lease."""

_UNKNOWN = "its state is lost: its environment was restarted, or closed it because its rollout was silent for too long"


class EnvironmentPool:
    """Runs one environment in `num_workers` processes; to be used from one event loop.

    A conversation that has a state goes to the process that has it; others go to whichever is free. A turn that passes
    the deadline, crashes its process or needs more memory than the limit fails, and its process is replaced. A
    conversation whose state was there resumes from its saved state if the environment saves it (`SavingEnvironment`),
    and fails with its next turn otherwise. With an environment that saves, a turn whose process ended is tried once
    more. A turn that runs for much longer than others gives way to those that wait (`Backlog`).

    With `max_batch` above 1 a call of the environment holds several conversations. If it raises, crashes or passes the
    deadline, those without a state, or with a saved one, are tried again one by one, so that only those to blame fail;
    others fail, as their state may be half stepped or lost.

    With `max_concurrent`, conversations wait before their first turn until others have ended, which takes nothing from
    their deadline.

    The processes see a few environment variables of this one (`child.PASSED`) and end with it, however it ends. Nothing
    that they send is unpickled (`messages`).

    Args:
        environment: `"package.module:Class"` or the same in a file of the user's, built in each process with its
            settings, or a scoring function as `as_environment` takes it; imported nowhere else.
        config: Its settings, picklable.
        num_workers: Number of processes; by default one per CPU, `MAX_DEFAULT_WORKERS` at most.
        deadline_s: Timeout of a call in seconds; the process that passes it is replaced.
        max_batch: Maximum number of conversations in a call.
        max_concurrent: Maximum number of conversations under way, in a call or with a state; None for no bound.
        memory_limit_gib: Maximum memory that a process may allocate; None for no limit.
        retries: How often a failed turn of a conversation without a state, or with a saved one, is tried again.
        env_vars: Further environment variables of the processes.
        lease_s: How long the conversations of a silent client are kept.
        name: Name of the instance (`env.<name>`), for messages.
        judges: Judges that its reward functions may ask; None for none.
    """

    def __init__(
        self,
        environment: str | FromFile | RewardSum,
        config: object,
        *,
        num_workers: int | None = None,
        deadline_s: float,
        max_batch: int = 1,
        max_concurrent: int | None = None,
        memory_limit_gib: float | None = None,
        retries: int = 0,
        env_vars: Mapping[str, str] | None = None,
        lease_s: float = LEASE_S,
        name: str = "",
        judges: JudgeClient | None = None,
    ) -> None:
        num_workers = default_num_workers() if num_workers is None else num_workers
        if num_workers < 1 or max_batch < 1 or not deadline_s > 0:
            raise ValueError(
                "num_workers, max_batch and deadline_s must be positive, "
                f"got {num_workers}, {max_batch} and {deadline_s}"
            )
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be positive or None, got {max_concurrent}")
        spec = ChildSpec(environment, pickle.dumps(config), name, env_vars or {}, memory_limit_gib, judges)

        def room() -> int:
            assert max_concurrent is not None, "asked for only if there is a bound"
            return max_concurrent - sum(worker.num_open for worker in self._workers)

        bound = None if max_concurrent is None else room
        self._backlog = Backlog(deadline_s=deadline_s, num_workers=num_workers, wake=self._wake, room=bound)
        self._workers = [
            Worker(spec, self._backlog, deadline_s=deadline_s, max_batch=max_batch) for _ in range(num_workers)
        ]
        self._retries = retries
        self._homes: dict[str, Home] = {}
        self._late: dict[str, tuple[str, asyncio.Task[StepResult | EnvironmentFailure]]] = {}
        self._leases = Leases(lease_s, self._expire)
        self._released: set[str] = set()
        self._closed = False
        self._stepping = spans.overlapping("turns", "turns")

    @classmethod
    def of(
        cls,
        environment: str | FromFile | RewardSum,
        config: EnvironmentConfig,
        name: str = "",
        judges: JudgeClient | None = None,
    ) -> EnvironmentPool:
        """Make a pool with an environment's own settings (`env.<name>`)."""
        names = ("num_workers", "deadline_s", "max_batch", "max_concurrent", "memory_limit_gib", "retries", "env_vars")
        return cls(environment, config, name=name, judges=judges, **{each: getattr(config, each) for each in names})

    async def start(self) -> None:
        """Start every process and build the environment there; otherwise the first `step` does.

        Raises:
            WorkerError: What importing or building the environment raised there.
            WorkerDied: If a process ended or hung before the environment was built.
        """
        self._require_open()
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def step(
        self, conversations: Sequence[Conversation], client: str = ""
    ) -> list[StepResult | EnvironmentFailure]:
        """Return one outcome per conversation, in order; the `state` of a result is a `KeptState`, as the state stays
        in its process.

        A conversation that is done or failed is forgotten. One past its first turn that the pool does not know resumes
        from its `resumption`; if it has none it fails: its state died with an earlier pool, or its lease ran out.

        Args:
            conversations: Each with its newest turn.
            client: Their owner. A client that makes no call (`step`, `renew`) for `lease_s` loses them; those without a
                client are kept until they end or are abandoned.

        Raises:
            ValueError: If a conversation is being stepped already.
            WorkerError, WorkerDied: See `start`, if an environment cannot be built.
        """
        self._require_open()
        turns = self._admit(conversations, client)
        self._leases.renew(client)
        self._backlog.add([turn for turn in turns if turn.home.worker is None])
        for turn in turns:
            if turn.home.worker is not None:
                turn.home.worker.submit(turn)
        try:
            with self._stepping:
                outcomes = await asyncio.gather(*(turn.outcome for turn in turns))
        except BaseException:
            for turn in turns:
                turn.outcome.cancel()
            for turn in turns:
                self._drop(turn.id)
            raise
        for turn, outcome in zip(turns, outcomes, strict=True):
            turn.home.busy = False
            ended = isinstance(outcome, EnvironmentFailure) or outcome.done
            if ended and self._homes.get(turn.id) is turn.home:
                del self._homes[turn.id]
        return outcomes

    async def step_within(
        self, patience_s: float, conversations: Sequence[Conversation], client: str = ""
    ) -> list[StepResult | EnvironmentFailure | None]:
        """Step conversations as `step` does, with None for each that is not answered in time: `late` has its outcome.
        Nothing is raised; each conversation has its own failure.
        """

        async def outcome(conversation: Conversation) -> StepResult | EnvironmentFailure:
            try:
                [found] = await self.step([conversation], client)
            except Exception as error:  # noqa: BLE001 - the failure is this conversation's outcome
                return EnvironmentFailure(f"{type(error).__name__}: {error}")
            return found

        for conversation in conversations:
            self._late[conversation.id] = client, asyncio.create_task(outcome(conversation))
        return await self.late(patience_s, [conversation.id for conversation in conversations])

    async def late(self, patience_s: float, ids: Sequence[str]) -> list[StepResult | EnvironmentFailure | None]:
        """Return the outcomes of these turns, with None for each that takes longer still."""
        in_progress = [self._late[id][1] for id in ids if id in self._late]
        if in_progress:
            await asyncio.wait(in_progress, timeout=patience_s)
        outcomes: list[StepResult | EnvironmentFailure | None] = []
        for id in ids:
            if id not in self._late:
                outcomes.append(EnvironmentFailure(_UNKNOWN, "lost"))
            elif self._late[id][1].done():
                outcomes.append(self._late.pop(id)[1].result())
            else:
                outcomes.append(None)
        return outcomes

    async def abandon(self, ids: Iterable[str]) -> None:
        """Forget these conversations and close their states; unknown ones are ignored."""
        for id in ids:
            self._late.pop(id, None)
            self._drop(id)

    async def renew(self, client: str) -> None:
        """Keep a client's conversations for another `lease_s`."""
        self._require_open()
        self._leases.renew(client)

    async def release(self, client: str) -> None:
        """Close the conversations of a client whose process has ended, so that others need not wait until its lease
        ends. Calls of this client that come later are refused."""
        self._released.add(client)
        self._leases.end(client)
        if num_closed := self._close_of(client):
            logger.info("%d conversations are closed: the process of their client has ended", num_closed)

    async def health(self) -> Mapping[str, Any]:
        """Return numbers worth logging: processes alive, restarts so far with the reason of the last one, conversations
        known and queued.

        Raises:
            WorkerError, WorkerDied: If the environment could not be built when last tried.
        """
        for worker in self._workers:
            if worker.broken is not None:
                raise worker.broken
        last = max(self._workers, key=lambda worker: worker.restarted_at)
        return {
            "num_workers": len(self._workers),
            "num_alive": sum(worker.alive for worker in self._workers),
            "num_restarts": sum(worker.num_restarts for worker in self._workers),
            "restart_reason": last.restart_reason,
            "num_conversations": len(self._homes),
            "num_queued": len(self._backlog) + sum(worker.num_queued for worker in self._workers),
        }

    async def close(self) -> None:
        """Close all states and end all processes; calls in progress fail. May be called again."""
        self._closed = True
        self._homes.clear()
        self._leases.close()
        fail_all(self._backlog.drain(), RuntimeError("the environment pool is closed"))
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _drop(self, id: str) -> None:
        home = self._homes.pop(id, None)
        if home is not None:
            home.abandoned = True
            if home.worker is not None:
                home.worker.abandon(id)

    def _expire(self, client: str) -> None:
        if num_closed := self._close_of(client):
            logger.warning("%d conversations are closed: their client has been silent for too long", num_closed)

    def _close_of(self, client: str) -> int:
        """Close all conversations of a client, and return their number."""
        ids = [id for id, home in self._homes.items() if home.client == client]
        # Outcomes that the client has not fetched are dropped as well.
        for id in [*ids, *(id for id, (owner, _) in self._late.items() if owner == client)]:
            self._late.pop(id, None)
            self._drop(id)
        return len(ids)

    def _admit(self, conversations: Sequence[Conversation], client: str) -> list[QueuedTurn]:
        if client in self._released:
            raise RuntimeError("the conversations of this client were closed, because its process had ended")
        ids = [conversation.id for conversation in conversations]
        twice = {id for id in ids if (home := self._homes.get(id)) is not None and home.busy}
        if twice or len(set(ids)) < len(ids):
            raise ValueError(
                "a conversation can take one step at a time; being stepped already, or named twice: "
                f"{sorted(twice or {id for id in ids if ids.count(id) > 1})}"
            )
        # What cannot be pickled raises here, before a conversation is known.
        shown = [each if each.resumption is None else replace(each, resumption=None) for each in conversations]
        payloads = [pickle.dumps(conversation, protocol=pickle.HIGHEST_PROTOCOL) for conversation in shown]
        turns, loop = [], asyncio.get_running_loop()
        for conversation, payload in zip(conversations, payloads, strict=True):
            home = self._homes.get(conversation.id)
            if home is None and conversation.resumption is not None:
                home = Home(client, saved=conversation.resumption.saved)
            elif home is None:
                home = Home(client, lost=_UNKNOWN if conversation.turn else "")
            self._homes[conversation.id] = home
            home.busy = True
            turns.append(QueuedTurn(conversation.id, payload, home, loop.create_future(), retries=self._retries))
        return turns

    def _wake(self) -> None:
        idle = sorted((worker for worker in self._workers if worker.idle), key=lambda worker: worker.num_states)
        for worker in idle[: len(self._backlog)]:
            worker.wake()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the environment pool is closed")


class Leases:
    """Leases of clients, which end when a client has been silent for too long; to be used from one event loop.

    Args:
        lease_s: Duration of a lease in seconds.
        expire: Called with a client whose lease ran out.
    """

    def __init__(self, lease_s: float, expire: Callable[[str], None]) -> None:
        self._lease_s = lease_s
        self._expire = expire
        self._ends: dict[str, asyncio.TimerHandle] = {}

    def renew(self, client: str) -> None:
        """Begin a client's lease anew; no client (an empty name) has none."""

        def end() -> None:
            del self._ends[client]
            self._expire(client)

        if client:
            if client in self._ends:
                self._ends[client].cancel()
            self._ends[client] = asyncio.get_running_loop().call_later(self._lease_s, end)

    def end(self, client: str) -> None:
        """End a client's lease without calling `expire`."""
        if client in self._ends:
            self._ends.pop(client).cancel()

    def close(self) -> None:
        """End every lease without calling `expire`."""
        for end in self._ends.values():
            end.cancel()
        self._ends.clear()


def default_num_workers() -> int:
    """Return the number of processes if the settings leave it open: one per CPU of this node, up to a bound."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_WORKERS)
