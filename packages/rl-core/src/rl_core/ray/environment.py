"""An environment in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayError

from rl_core.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.errors import Origin
from rl_core.ray.calls import translate


class RemoteEnvironment:
    """Facade of an environment's process pool, for many rollouts on one event loop.

    Calls that are made while another is on its way travel together in the next one, so a thousand rollouts cost a few
    messages.

    Args:
        actor: an `AsyncWorkerHost` that holds an `rl_core.environments.pool.EnvironmentPool`.
        name: of the environment, for messages.
    """

    def __init__(self, actor: ActorHandle, *, name: str) -> None:
        self._actor = actor
        self._name = name
        self._queue: list[tuple[Conversation, asyncio.Future[StepResult | EnvironmentFailure]]] = []
        self._sender: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _remote_environment, (self._actor, self._name)

    async def step(self, conversation: Conversation) -> StepResult | EnvironmentFailure:
        """The environment's answer to one conversation."""
        answer: asyncio.Future[StepResult | EnvironmentFailure] = asyncio.get_running_loop().create_future()
        self._queue.append((conversation, answer))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def abandon(self, conversation_ids: Sequence[str]) -> None:
        """Free what the environment holds for conversations that will not go on."""
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

    async def _call(self, calls: list[tuple[Conversation, asyncio.Future[StepResult | EnvironmentFailure]]]) -> None:
        """Answer every one of these calls, whatever happens to the call that they share."""
        outcomes: Sequence[StepResult | EnvironmentFailure]
        try:
            outcomes = await self._actor.call.remote("step", [conversation for conversation, _ in calls])
            if len(outcomes) != len(calls):
                raise ValueError(f"{len(outcomes)} answers to {len(calls)} conversations")
        except Exception as error:  # noqa: BLE001 - the failure is each waiting rollout's report
            outcomes = [EnvironmentFailure(self._reason(error))] * len(calls)
        except asyncio.CancelledError:
            for _, answer in calls:
                answer.cancel()
            raise
        for (_, answer), outcome in zip(calls, outcomes, strict=True):
            if not answer.done():
                answer.set_result(outcome)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, RayError):
            return str(translate(error, Origin(f"environment {self._name}", 0, "its node", "step")))
        return f"environment {self._name} could not be called: {type(error).__name__}: {error}"


def _remote_environment(actor: ActorHandle, name: str) -> RemoteEnvironment:
    return RemoteEnvironment(actor, name=name)
