"""The process that asks the judges of a run, and the engines of rollout workers that it asks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rl_algos.judges.answers import JudgeAnswer
from rl_algos.judges.config import EndpointJudgeConfig, GeneratorJudgeConfig
from rl_algos.judges.rubrics import Rubric
from rl_algos.judges.service import JudgeService
from rl_algos.judges.verdict_cache import VerdictCache
from rl_core.errors import GeneratorError, WorkerDied
from rl_core.rollouts.judging import JudgedReward, JudgedRollout, JudgeVerdict, Question

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JudgeHostSpec:
    """The judges of a run that are language models; sent to their process.

    Args:
        judges: Judges by name.
        rewards: Rewards by these judges, by environment and reported name.
        cache_folder: Folder of verdicts, which runs share.
        spent_file: File of the run in which spent tokens are counted.
        versions: Version of each generator whose weights never change, as far as its name does not tell.
        uncached: Generators whose weights may change while a question is under way.
    """

    judges: Mapping[str, EndpointJudgeConfig | GeneratorJudgeConfig]
    rewards: Mapping[str, Mapping[str, Rubric]]
    cache_folder: Path | None
    spent_file: Path | None
    versions: Mapping[str, str] = field(default_factory=dict)
    uncached: frozenset[str] = frozenset()


class JudgeHost:
    """Holds the `JudgeService` of a run. All its methods are called on one event loop.

    Args:
        spec: The judges.
    """

    def __init__(self, spec: JudgeHostSpec) -> None:
        self._spec = spec
        self._engines = JudgeEngines()
        self._service = JudgeService(spec.judges, spec.cache_folder, spec.spent_file, self._engines.ask, self._version)

    async def start(self) -> None:
        """Begin to remove verdicts that no run has used for long."""
        if self._spec.cache_folder is not None:
            pruned = VerdictCache(self._spec.cache_folder).prune
            self._pruning = asyncio.create_task(asyncio.to_thread(pruned))

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        """See `JudgeService.ask`."""
        await self._await_engines([judge])
        return await self._service.ask(judge, questions)

    async def judge(self, environment: str, group: Sequence[JudgedRollout | None]) -> list[dict[str, JudgedReward]]:
        """Return the rewards of the rollouts of one prompt; see `JudgeService.judge`.

        Args:
            environment: Environment of the prompt.
            group: The rollouts; None for one that failed.
        """
        rewards = self._spec.rewards[environment]
        await self._await_engines([reward.judge for reward in rewards.values()])
        return await self._service.judge(rewards, group)

    async def join(self, engine: JudgingEngine, index: int, ready: Mapping[str, str]) -> None:
        """Take the engines of a rollout worker; see `JudgeEngines.join`."""
        self._engines.join(engine, index, ready)

    async def usage(self) -> dict[str, float]:
        """See `JudgeService.usage`."""
        return self._service.usage()

    async def health(self) -> Mapping[str, Any]:
        """Return the number of rollout workers whose engines judge, and restarts as environments report them."""
        return {"num_engines": self._engines.num_workers, "num_restarts": 0, "restart_reason": ""}

    async def close(self) -> None:
        """See `JudgeService.close`."""
        await self._service.close()

    async def _await_engines(self, names: Sequence[str]) -> None:
        """Wait until the versions of generators are known, which a process that was started again has to learn."""
        for name in names:
            if isinstance(self._spec.judges.get(name), GeneratorJudgeConfig):
                await self._engines.any_of(name)

    def _version(self, judge: str) -> str | None:
        if judge in self._spec.uncached:
            return None
        return self._spec.versions.get(judge, "") + self._engines.version(judge)


class JudgingEngine(Protocol):
    """The engines of a rollout worker; see `rl_core.ray.judges.RemoteEngine`."""

    async def answer(self, judge: str, question: Question) -> JudgeAnswer:
        """Return the answer of a judge to a question."""


class JudgeEngines:
    """Engines of rollout workers that serve judges. One that died is forgotten, and its questions are asked elsewhere:
    a rollout worker that takes its place joins.
    """

    def __init__(self) -> None:
        self._workers: dict[int, tuple[JudgingEngine, dict[str, str]]] = {}
        self._load: Counter[int] = Counter()
        self._versions: dict[str, str] = {}
        self._joined = asyncio.Condition()

    @property
    def num_workers(self) -> int:
        """Number of rollout workers that have joined."""
        return len(self._workers)

    def version(self, judge: str) -> str:
        """Return the newest version of a judge's weights; empty if they never change."""
        return self._versions.get(judge, "")

    def join(self, engine: JudgingEngine, index: int, ready: Mapping[str, str]) -> None:
        """Take a rollout worker, or what has changed of it.

        Args:
            engine: Reaches its engines.
            index: Its number.
            ready: Version of the weights of each judge that its engines serve.
        """
        self._workers[index] = engine, dict(ready)
        self._versions |= ready
        asyncio.get_running_loop().create_task(self._notify())

    async def any_of(self, judge: str) -> int:
        """Wait for a rollout worker that serves a judge, and return the number of the one with the least to do."""
        async with self._joined:
            await self._joined.wait_for(lambda: any(judge in ready for _, ready in self._workers.values()))
            serving = [index for index, (_, ready) in self._workers.items() if judge in ready]
            return min(serving, key=lambda index: (self._load[index], index))

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeAnswer]:
        """Return the answers to questions, in order."""
        return await asyncio.gather(*(self._ask(judge, question) for question in questions))

    async def _ask(self, judge: str, question: Question) -> JudgeAnswer:
        while True:
            index = await self.any_of(judge)
            engine, _ = self._workers[index]
            self._load[index] += 1
            try:
                return await engine.answer(judge, question)
            except (WorkerDied, GeneratorError) as error:
                # The driver replaces it; a worker that has joined since under this number is another one.
                _log.warning("rollout worker %d does not judge: %s", index, error)
                if index in self._workers and self._workers[index][0] is engine:
                    del self._workers[index]
            finally:
                self._load[index] -= 1

    async def _notify(self) -> None:
        async with self._joined:
            self._joined.notify_all()
