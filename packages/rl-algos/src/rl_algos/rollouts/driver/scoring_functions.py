"""Reward functions that ask reward models: they are called when the rollouts of a step have ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from rl_algos.judges.judged import CONVERSATION, given_verdicts
from rl_algos.judges.rubrics import Rubric
from rl_core.environments.instance import EnvironmentInstance
from rl_core.environments.pool import EnvironmentPool
from rl_core.environments.rewards import RewardSum
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.judging import JudgedReward, JudgedRollout, JudgeVerdict, Question

T = TypeVar("T")

GATHER_S = 0.02
"""Seconds in which further questions are gathered before a model is asked."""
NUM_TRIES = 2
"""Number of times that functions are called if their process ends."""


class ModelJudge(Protocol):
    """A model of the run that judges; see `rl_algos.judges.reward_model.RewardModelJudge`."""

    def judge(
        self, rewards: Mapping[str, Rubric], groups: Sequence[Sequence[JudgedRollout | None]]
    ) -> Sequence[Sequence[Mapping[str, JudgedReward]]]:
        """Return the rewards of each rollout by name, in the order of the groups."""

    def usage(self) -> Mapping[str, float]:
        """Return the metrics of the judge since the last call."""


class ModelScores:
    """Reward models as functions ask them; see `rl_core.rollouts.judging.JudgeClient`.

    Questions of all functions that wait are given to a model together. Each is computed alone, so that its score
    depends on nothing else, and equal ones of a step are computed once.

    Args:
        judges: The models by name.

    Attributes:
        names: Their names.
        error: Exception of a model; None if it raised none.
    """

    give_scores = True

    def __init__(self, judges: Mapping[str, ModelJudge]) -> None:
        self.names = tuple(judges)
        self.error: Exception | None = None
        self._judges = judges
        self._asked: dict[tuple[str, str], Question] = {}
        self._verdicts: dict[tuple[str, str], asyncio.Future[JudgeVerdict]] = {}
        self._working: asyncio.Task[None] | None = None

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        return list(await asyncio.gather(*(self._ask(judge, question) for question in questions)))

    def forget(self) -> None:
        """Forget the scores of a step, which hardly come again."""
        self._verdicts.clear()

    async def _ask(self, judge: str, question: Question) -> JudgeVerdict:
        key = judge, question.digest
        if is_known := key in self._verdicts:
            verdict = await asyncio.shield(self._verdicts[key])
        else:
            self._asked[key] = question
            self._verdicts[key] = asyncio.get_running_loop().create_future()
            if self._working is None or self._working.done():
                self._working = asyncio.create_task(self._work())
            verdict = await asyncio.shield(self._verdicts[key])
        return JudgeVerdict(judge, verdict.question, "", verdict.value, verdict.failure, is_cached=is_known)

    async def _work(self) -> None:
        while self._asked:
            await asyncio.sleep(GATHER_S)
            asked, self._asked = self._asked, {}
            for judge in self.names:
                own = {digest: question for (name, digest), question in asked.items() if name == judge}
                if own:
                    await self._score(judge, own)

    async def _score(self, judge: str, own: Mapping[str, Question]) -> None:
        shown = [[JudgedRollout(each.messages[:-1], each.messages[-1:])] for each in own.values()]
        try:
            found = await asyncio.to_thread(self._judges[judge].judge, {judge: Rubric(judge)}, shown)
            rewards = [group[0][judge] for group in found]
        except Exception as error:  # noqa: BLE001 - it is raised where the functions were called
            self.error = error
            rewards = [JudgedReward(None, failure=f"{type(error).__name__}: {error}") for _ in shown]
        for digest, reward in zip(own, rewards, strict=True):
            verdict = JudgeVerdict(judge, digest, value=reward.value, failure=reward.failure)
            self._verdicts[judge, digest].set_result(verdict)


class ScoringFunctions:
    """The functions of `env.<name>.rewards` that ask reward models, in processes next to the driver.

    Args:
        environments: Environments of these functions alone, by name.
        judges: The models of the run that judge, by name.
    """

    def __init__(self, environments: Mapping[str, EnvironmentInstance], judges: Mapping[str, ModelJudge]) -> None:
        self._environments = environments
        self._scores = ModelScores(judges)
        self._pools: dict[str, EnvironmentPool] = {}
        # A notebook runs its cells in a loop, and a thread has only one.
        self._thread = ThreadPoolExecutor(1, "scoring functions")
        self._runner = asyncio.Runner()

    def weights(self, environment: str) -> dict[str, float]:
        """Return the weights of the functions of an environment, by reported name; none if it has no functions."""
        found = self._environments.get(environment)
        if found is None:
            return {}
        assert isinstance(found.environment, RewardSum), "functions of `rewards` are a sum"
        return {part.name: part.weight for part in found.environment.parts}

    def rewards(self, groups: Sequence[RolloutGroup]) -> list[list[dict[str, JudgedReward]]]:
        """Return the rewards of the rollouts of each group by name; none for those that no function scores.

        Raises:
            Exception: The exception of a model.
        """
        conversations: dict[str, dict[tuple[int, int], Conversation]] = {}
        for number, group in enumerate(groups):
            environment = group.prompt.environment
            if environment in self._environments:
                own = conversations.setdefault(environment, {})
                own |= {(number, place): found for place, found in _kept(number, group).items()}
        given: list[list[dict[str, JudgedReward]]] = [[{} for _ in group.rollouts.status] for group in groups]
        if not conversations:
            return given
        outcomes = self._run(self._called(conversations))
        for environment, of_environment in outcomes.items():
            for (number, place), outcome in of_environment.items():
                given[number][place] = _rewards_of(outcome, list(self.weights(environment)))
        return given

    def close(self) -> None:
        """End the processes."""

        async def closed() -> None:
            await asyncio.gather(*(pool.close() for pool in self._pools.values()))

        self._run(closed())
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.submit(self._runner.run, work).result()

    async def _called(
        self, conversations: Mapping[str, Mapping[tuple[int, int], Conversation]]
    ) -> dict[str, dict[tuple[int, int], StepResult | EnvironmentFailure]]:
        outcomes = await asyncio.gather(*(self._stepped(*each) for each in conversations.items()))
        self._scores.forget()
        if self._scores.error is not None:
            error, self._scores.error = self._scores.error, None
            raise error
        return dict(zip(conversations, outcomes, strict=True))

    async def _stepped(
        self, name: str, conversations: Mapping[tuple[int, int], Conversation]
    ) -> dict[tuple[int, int], StepResult | EnvironmentFailure]:
        if name not in self._pools:
            instance = self._environments[name]
            self._pools[name] = EnvironmentPool.of(
                instance.environment, instance.config, instance.label, judges=self._scores
            )
        left, found = dict(conversations), dict[tuple[int, int], StepResult | EnvironmentFailure]()
        for _ in range(NUM_TRIES):
            found |= zip(left, await self._pools[name].step(list(left.values())), strict=True)
            left = {key: each for key, each in left.items() if _has_died(found[key])}
            if not left:
                break
        return found


def _has_died(outcome: StepResult | EnvironmentFailure) -> bool:
    return isinstance(outcome, EnvironmentFailure) and outcome.fault == "process"


def _kept(number: int, group: RolloutGroup) -> dict[int, Conversation]:
    """Return the conversations of the rollouts of a group that functions score, by their place in it."""
    found = {}
    for place, record in enumerate(group.records.ragged(RECORD)):
        kept = json.loads(record.tobytes())["info"].get(CONVERSATION)
        if kept is not None and group.rollouts.status[place] != "failed":
            found[place] = Conversation.from_plain(f"{number}/{place}", group.prompt.info, kept)
    return found


def _rewards_of(outcome: StepResult | EnvironmentFailure, names: Sequence[str]) -> dict[str, JudgedReward]:
    """Return the rewards of a rollout by the name of the function; those that do not apply to its row are left out."""
    if isinstance(outcome, EnvironmentFailure):
        return {names[0]: JudgedReward(None, failure=outcome.reason)}
    info, verdicts = given_verdicts(outcome.info)
    values = outcome.rewards()
    rewards = {name: JudgedReward(values[name]) for name in names if name in values}
    if rewards:
        first = next(iter(rewards))
        rewards[first] = JudgedReward(values[first], verdicts=verdicts, info=info)
    return rewards
