"""An environment in another process."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from rl_core.environments.pool import RENEW_S
from rl_core.errors import FailureOrigin
from rl_core.ray.calls import translate
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult

_log = logging.getLogger(__name__)

PATIENCE_S = 0.5
"""How long finished outcomes wait for others of their call, so that one that hangs holds up no other."""
SILENCE_S = 600.0
"""How long the environment's process may leave a trivial call unanswered; it may be restarting. A run's driver restarts
one that is silent long before that."""


class RemoteEnvironment:
    """Facade of an environment's process pool, for many rollouts on one event loop.

    Calls that are made while another is on its way travel together in the next one, so a thousand rollouts cost a few
    messages. While conversations are open, their lease is renewed regularly; if the pool does not answer a renewal
    within `silence_s`, every rollout that waits for it fails.

    Args:
        actor: An `AsyncWorkerHost` that holds an `rl_core.environments.pool.EnvironmentPool`.
        name: Name of the environment, for messages.
        client: Name of the process that has the conversations, by which they are closed when it ends (`release`). If it
            is empty, each process with a copy of this has a name of its own.
        renew_s: Seconds between renewals of the lease on its conversations.
        silence_s: Timeout of a renewal in seconds.
    """

    def __init__(
        self, actor: ActorHandle, *, name: str, client: str = "", renew_s: float = RENEW_S, silence_s: float = SILENCE_S
    ) -> None:
        self._actor = actor
        self._name = name
        self._renew_s = renew_s
        self._silence_s = silence_s
        self._given_client = client
        self._client = client or uuid.uuid4().hex
        self._queue: list[_Waiting] = []
        self._sender: asyncio.Task[None] | None = None
        self._open: set[str] = set()
        self._unanswered: set[_Answer] = set()
        self._keeper: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RemoteEnvironment, name=self._name, client=self._given_client), (self._actor,)

    def of_client(self, client: str) -> RemoteEnvironment:
        """Return the same environment for a process that will have conversations under this name."""
        return RemoteEnvironment(self._actor, name=self._name, client=client)

    def release(self) -> None:
        """Close the conversations of this client, whose process has ended; returns at once."""
        self._actor.call.remote("release", self._client)

    async def step(self, conversation: Conversation) -> StepResult | EnvironmentFailure:
        """Return the environment's answer to one conversation."""
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._open.add(conversation.id)
        self._queue.append((conversation, answer))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        outcome = await answer
        if isinstance(outcome, EnvironmentFailure) or outcome.done:
            self._open.discard(conversation.id)
        return outcome

    async def abandon(self, conversation_ids: Sequence[str]) -> None:
        """Free what the environment holds for conversations that will not continue."""
        self._open.difference_update(conversation_ids)
        async with asyncio.timeout(self._silence_s):
            await self._actor.call.remote("abandon", list(conversation_ids))

    async def _send(self) -> None:
        in_flight: set[asyncio.Task[None]] = set()
        await asyncio.sleep(0)
        while self._queue:
            calls, self._queue = self._queue, []
            task = asyncio.create_task(self._call(calls))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
            await asyncio.sleep(0.002)
        self._sender = None
        if in_flight:
            await asyncio.gather(*in_flight)

    async def _call(self, calls: list[_Waiting]) -> None:
        """Answer every one of these calls, even if the call that they share fails."""
        conversations = [conversation for conversation, _ in calls]
        try:
            sent: Any = self._actor.call.remote("step_within", PATIENCE_S, conversations, self._client)
        except Exception as error:  # noqa: BLE001 - whatever cannot be sent, such as lists within lists
            if len(calls) == 1:
                self._settle(calls, [EnvironmentFailure(self._reason(error))])
            else:
                await asyncio.gather(*(self._call([each]) for each in calls))
            return
        waiting = calls
        try:
            outcomes = await sent
            while waiting := self._settle(waiting, outcomes):
                ids = [conversation.id for conversation, _ in waiting]
                outcomes = await self._actor.call.remote("late", PATIENCE_S, ids)
        except Exception as error:  # noqa: BLE001 - the failure is each waiting rollout's report
            self._settle(waiting, [EnvironmentFailure(self._reason(error))] * len(waiting))
        except asyncio.CancelledError:
            for _, answer in waiting:
                answer.cancel()
            raise

    @staticmethod
    def _settle(calls: list[_Waiting], outcomes: Sequence[StepResult | EnvironmentFailure | None]) -> list[_Waiting]:
        """Answer those that have an outcome; returns the others that are still waited for."""
        if len(outcomes) != len(calls):
            raise ValueError(f"{len(outcomes)} answers to {len(calls)} conversations")
        for (_, answer), outcome in zip(calls, outcomes, strict=True):
            if outcome is not None and not answer.done():
                answer.set_result(outcome)
        return [(conversation, answer) for conversation, answer in calls if not answer.done()]

    async def _keep(self) -> None:
        """Renew the lease on open conversations until there are none."""
        try:
            while self._open:
                await asyncio.sleep(self._renew_s)
                try:
                    async with asyncio.timeout(self._silence_s):
                        await self._actor.call.remote("renew", self._client)
                except TimeoutError:
                    failure = EnvironmentFailure(f"environment {self._name} has not answered for {self._silence_s:g} s")
                    _log.warning("%s; %d rollouts that wait for it fail", failure.reason, len(self._unanswered))
                    for answer in list(self._unanswered):
                        answer.set_result(failure)
                except RayError as error:
                    # A call in progress reports it, and the pool of a restarted process knows no conversation.
                    _log.debug("environment %s: the lease was not renewed: %s", self._name, error)
        finally:
            self._keeper = None

    def _reason(self, error: Exception) -> str:
        if isinstance(error, RayError):
            return str(translate(error, FailureOrigin(f"environment {self._name}", 0, "its node", "step")))
        return f"environment {self._name} could not be called: {type(error).__name__}: {error}"


_Answer = asyncio.Future[StepResult | EnvironmentFailure]
_Waiting = tuple[Conversation, _Answer]
