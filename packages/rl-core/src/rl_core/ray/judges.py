"""The judges of a run in another process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rl_core.errors import FailureOrigin, RLError, WorkerDied
from rl_core.ray.calls import fetch, translate
from rl_core.rollouts.judging import JudgedReward, JudgedRollout, JudgeVerdict, Question

_log = logging.getLogger(__name__)

USAGE_TIMEOUT_S = 30.0
"""Timeout in seconds of a question for the use of judges."""


class RemoteJudges:
    """Facade of the process that asks the judges of a run. Ray starts that process again if it dies, and repeats the
    calls that wait for it.

    Args:
        actor_name: Name of the actor, a `RestartingHost` that holds an `rl_algos.judges.host.JudgeHost`. As an argument
            of actors that Ray starts again, its handle could be lost.
        names: Names of the judges that can be asked.
    """

    give_scores = False

    def __init__(self, actor_name: str, names: tuple[str, ...]) -> None:
        self._actor_name = actor_name
        self.names = names
        self._own: RemoteEngine | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteJudges, (self._actor_name, self.names)

    @cached_property
    def _actor(self) -> ActorHandle:
        return ray.get_actor(self._actor_name)

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        """See `rl_core.rollouts.judging.JudgeClient.ask`."""
        verdicts: list[JudgeVerdict] = await self._call("ask", judge, list(questions))
        return verdicts

    async def judge(self, environment: str, group: Sequence[JudgedRollout | None]) -> list[Mapping[str, JudgedReward]]:
        """Return the rewards of the rollouts of one prompt, by the name of the reward.

        Args:
            environment: Environment of the prompt, whose rewards they are.
            group: The rollouts; None for one that failed.

        Raises:
            JudgeBudgetSpent: If a judge may not be asked again.
            WorkerDied: If the process has ended for good.
        """
        rewards: list[Mapping[str, JudgedReward]] = await self._call("judge", environment, list(group))
        return rewards

    async def join(self, index: int, ready: Mapping[str, str]) -> None:
        """Offer the engines of this process, an actor, to the judges.

        Args:
            index: Number of the replica. An earlier offer with this number ends.
            ready: Version of the weights of each judge that its engines serve.
        """
        if self._own is None:
            self._own = RemoteEngine(ray.get_runtime_context().current_actor, index)
        await self._call("join", self._own, index, dict(ready))

    def usage(self) -> dict[str, float]:
        """Return the metrics of the judges since the last call; nothing if their process does not answer."""
        try:
            found: dict[str, float] = fetch(self._actor.call.remote("usage"), _origin("usage"), USAGE_TIMEOUT_S)
        except RLError as error:
            _log.warning("%s", error)
            return {}
        return found

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._actor.call.remote(method, *args)
        except RayError as error:
            failure = translate(error, _origin(method))
        # The death of another process is not a failure of the caller's own.
        raise RLError(str(failure)) if isinstance(failure, WorkerDied) else failure


class RemoteEngine:
    """Engines of a rollout worker that judge.

    Args:
        actor: The process of the rollout worker.
        index: Its number, for messages.
    """

    def __init__(self, actor: ActorHandle, index: int) -> None:
        self._actor = actor
        self._index = index

    async def answer(self, judge: str, question: Question) -> Any:
        """Return the answer of a judge to a question.

        Raises:
            WorkerDied, GeneratorError: If the process or the engine died.
        """
        try:
            return await self._actor.call.remote("answer", judge, question)
        except RayError as error:
            raise translate(error, FailureOrigin("rollout worker", self._index, "its node", f"judge {judge}")) from None


def _origin(method: str) -> FailureOrigin:
    return FailureOrigin("judges", 0, "its node", method)
