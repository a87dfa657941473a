"""The service of a run that asks judges: limits, budget, cache and second tries are below it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from rl_algos.judges.answers import JudgeAnswer, UnreadableAnswer, form_problem, one_line, read_answer
from rl_algos.judges.config import EndpointJudgeConfig, GeneratorJudgeConfig
from rl_algos.judges.endpoint import EndpointJudge
from rl_algos.judges.limits import JudgeClock, SpentTokens
from rl_algos.judges.rubrics import Rubric, plan
from rl_algos.judges.verdict_cache import CachedAnswer, VerdictCache
from rl_core.config import plain
from rl_core.rollouts.judging import JudgedReward, JudgedRollout, JudgeVerdict, Question

AskEngine = Callable[[str, Sequence[Question]], Awaitable[Sequence[JudgeAnswer]]]
"""Asks the engines of a judge, by its name, questions; returns an answer to each, in order."""

NUM_DRAWS = 2
"""Number of times that a question is asked until its answer can be read."""

UNIDENTIFYING = frozenset({"api_key", "limits", "timeout_s", "max_tries", "cache"})
"""Keys of a judge that do not change its verdicts."""


def fixed_version(judge: str) -> str | None:
    """Return the version of a judge whose model never changes."""
    return ""


class JudgeService:
    """Asks the judges of a run that are language models. All methods are called on one event loop.

    Rewards do not depend on the order in which questions are asked, or on what is already in the cache.

    Args:
        judges: Judges by name: endpoints, and generators in engines of the run.
        cache_folder: Folder of verdicts, which several runs may share; None to keep none on disk.
        spent_file: File of the run in which spent tokens are counted, so that a budget holds over a kill and a resume;
            None to count in memory.
        ask_engine: Asks the engines of generators; needed if there are any.
        version: Returns the version of a generator's weights, such as the digest of the policy's; verdicts in the cache
            belong to a version. None if its verdicts must not be cached at present.
        clock: Time of limits and waits.

    Attributes:
        names: Names of the judges.
    """

    give_scores = False

    def __init__(
        self,
        judges: Mapping[str, EndpointJudgeConfig | GeneratorJudgeConfig],
        cache_folder: Path | None = None,
        spent_file: Path | None = None,
        ask_engine: AskEngine | None = None,
        version: Callable[[str], str | None] = fixed_version,
        clock: JudgeClock | None = None,
    ) -> None:
        self._judges = dict(judges)
        self.names = tuple(self._judges)
        self._cache = None if cache_folder is None else VerdictCache(cache_folder)
        self._spent = SpentTokens(spent_file)
        # Answers that cannot be read are kept for the run itself: another run may have a better answer.
        self._run = uuid.uuid4().hex if spent_file is None else _digest(str(spent_file.resolve()))
        self._ask_engine, self._version = ask_engine, version
        clock = JudgeClock() if clock is None else clock
        self._endpoints = {
            name: EndpointJudge(name, judge, self._spent, clock)
            for name, judge in self._judges.items()
            if isinstance(judge, EndpointJudgeConfig)
        }
        self._asked: dict[tuple[str, str], asyncio.Task[tuple[JudgeAnswer, bool]]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(self._judges, 0.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        """Return the verdicts on questions, in order. A question without an answer that can be read is asked once more,
        with the next draw; then its verdict has a `failure`.

        Raises:
            JudgeBudgetSpent: If the judge has no tokens left for a question.
        """
        # All questions end first: an answer that is paid for is kept, also if another one cannot be paid.
        asked = [self._verdict(judge, question) for question in questions]
        found = await asyncio.gather(*asked, return_exceptions=True)
        verdicts = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            verdicts.append(each)
        return verdicts

    async def judge(
        self, rewards: Mapping[str, Rubric], group: Sequence[JudgedRollout | None]
    ) -> list[dict[str, JudgedReward]]:
        """Return the rewards of the rollouts of one prompt, by the name of the reward.

        Args:
            rewards: Rewards by judges of this service, by reported name; `rl_algos.judges.config.judged_rewards` makes
                them on the driver.
            group: Rollouts of one prompt; None for one that failed, which has no rewards.

        Raises:
            JudgeBudgetSpent: If a judge has no tokens left.
        """
        present = [rollout for rollout in group if rollout is not None]
        plans = {name: plan(rubric, present) for name, rubric in rewards.items()} if present else {}
        asked = await asyncio.gather(
            *(self.ask(rewards[name].judge, each.questions) for name, each in plans.items()), return_exceptions=True
        )
        given: dict[str, list[JudgedReward]] = {}
        for (name, each), verdicts in zip(plans.items(), asked, strict=True):
            if isinstance(verdicts, BaseException):
                raise verdicts
            given[name] = each.rewards(verdicts)
        rows = iter(range(len(present)))
        return [
            {} if rollout is None else {name: column[row] for row in [next(rows)] for name, column in given.items()}
            for rollout in group
        ]

    def usage(self) -> dict[str, float]:
        """Return the metrics `judge/<name>/...` since the last call: `requests`, `tokens`, `cached`, `unparsed`,
        `failed` (numbers) and `latency` (mean seconds of a request)."""
        found: dict[str, float] = {}
        for name in self._judges:
            if name in self._endpoints:
                endpoint = self._endpoints[name]
                self._counts[name, "requests"] += endpoint.num_requests
                self._seconds[name] += endpoint.seconds
                endpoint.num_requests, endpoint.seconds = 0, 0.0
            for count in ("requests", "tokens", "cached", "unparsed", "failed"):
                found[f"judge/{name}/{count}"] = float(self._counts[name, count])
            if num_requests := self._counts[name, "requests"]:
                found[f"judge/{name}/latency"] = self._seconds[name] / num_requests
        self._counts.clear()
        self._seconds = dict.fromkeys(self._judges, 0.0)
        return found

    async def close(self) -> None:
        """Close connections and files."""
        for task in self._asked.values():
            task.cancel()
        await asyncio.gather(*self._asked.values(), return_exceptions=True)
        for endpoint in self._endpoints.values():
            await endpoint.close()
        self._spent.close()

    async def _verdict(self, judge: str, question: Question) -> JudgeVerdict:
        """Ask a question until its answer can be read, twice at most."""
        named = JudgeVerdict(judge, question.digest)
        if problem := form_problem(question):
            self._counts[judge, "failed"] += 1
            return replace(named, failure=problem)
        answer, reason, num_tokens, is_cached = JudgeAnswer(), "", 0, True
        for draw in range(question.draw, question.draw + NUM_DRAWS):
            answer, was_kept = await self._shared_answer(judge, replace(question, draw=draw))
            num_tokens, is_cached = num_tokens + answer.num_tokens, is_cached and was_kept
            reason = _problem_of(answer, question)
            if not reason:
                self._counts[judge, "cached"] += is_cached
                value = read_answer(answer.text, question.form)
                return replace(named, text=answer.text, value=value, num_tokens=num_tokens, is_cached=is_cached)
            if answer.is_final:
                break
            self._counts[judge, "unparsed"] += 1
        self._counts[judge, "failed"] += 1
        return replace(named, text=answer.text, failure=reason, num_tokens=num_tokens, is_cached=is_cached)

    async def _shared_answer(self, judge: str, question: Question) -> tuple[JudgeAnswer, bool]:
        """Return the answer to a question, and whether nobody had to be asked. A question that is being asked already
        is not asked again, and its answer is kept although the first who asked may no longer wait."""
        key = judge, question.digest
        if known := self._asked.get(key):
            return (await asyncio.shield(known))[0], True
        task = self._asked[key] = asyncio.create_task(self._answer(judge, question))
        task.add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(task)

    async def _answer(self, judge: str, question: Question) -> tuple[JudgeAnswer, bool]:
        """Return the answer to a question, from the cache or from the judge, and whether it was in the cache."""
        config = self._judges[judge]
        version = self._version(judge) if isinstance(config, GeneratorJudgeConfig) else ""
        identity = _identity(config, version or "")
        cache = self._cache if config.cache and version is not None else None
        if cache is not None:
            kept = await asyncio.to_thread(cache.read, identity, question.digest)
            if kept is not None and kept.run in ("", self._run):
                return JudgeAnswer(kept.text, failure=kept.failure), True
        if judge in self._endpoints:
            answer = await self._endpoints[judge].ask(question)
        else:
            assert self._ask_engine is not None, f"the judge {judge} is in an engine, but the service reaches none"
            begun = time.monotonic()
            (answer,) = await self._ask_engine(judge, [question])
            self._seconds[judge] += time.monotonic() - begun
            self._counts[judge, "requests"] += 1
        self._counts[judge, "tokens"] += answer.num_tokens
        if cache is not None and not answer.is_final:
            problem = _problem_of(answer, question)
            # What cannot be read may be of any size, and its reason is enough.
            entry = CachedAnswer("", problem, self._run) if problem else CachedAnswer(answer.text)
            # Nothing else runs before the answer is kept, so that a kill loses no more answers than may be in progress.
            cache.write(identity, question.digest, entry)
        return answer, False


def _identity(config: EndpointJudgeConfig | GeneratorJudgeConfig, version: str) -> str:
    """Return the digest of everything that a judge's verdicts depend on, in addition to the question."""
    values = {key: value for key, value in plain(config).items() if key not in UNIDENTIFYING}
    return _digest(json.dumps([values, version], sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _problem_of(answer: JudgeAnswer, question: Question) -> str:
    """Return the reason that an answer is not a verdict; empty if it is one."""
    if answer.failure:
        return answer.failure
    try:
        read_answer(answer.text, question.form)
    except UnreadableAnswer as error:
        return f"its answer cannot be read: {one_line(str(error))}"
    return ""
