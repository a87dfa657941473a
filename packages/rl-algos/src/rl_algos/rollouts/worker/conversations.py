"""The environment's side of one rollout: its conversations, now and in an earlier run of the rollout."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rl_algos.judges.judged import CONVERSATION
from rl_core.environments.messages import write_results
from rl_core.errors import EnvironmentFailed, InfrastructureFailed
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, KeptState, Resumption, StepResult
from rl_core.rollouts.judging import JudgeBudgetSpent
from rl_core.rollouts.pool import AnsweredTurns

_log = logging.getLogger(__name__)

_OF_ENVIRONMENTS = 0x656E76
"""Separates the seeds of conversations from other seeds that follow from the seed of a rollout."""
_WARNED: set[str] = set()
"""Environments whose replays are known to differ."""


class EnvironmentClient(Protocol):
    """An environment, one conversation at a time."""

    async def step(self, conversation: Conversation) -> StepResult | EnvironmentFailure:
        """Return the environment's answer, or the reason that there is none."""

    async def abandon(self, conversation_ids: Sequence[str]) -> None:
        """Free the resources of the environment for conversations that will not continue."""


@dataclass
class _Course:
    """A conversation of the rollout.

    Args:
        id: Id in the environment.
        seed: Its seed.
        earlier: Answers of an earlier run, as long as the turns are equal to the answered ones.
        digests: Digests of the turns so far.
        results: Answers so far; of the states only the last is kept.
        untold: Turns that were answered from the earlier run, without the environment.
        is_open: True while the environment may hold something for it.
    """

    id: str
    seed: int
    earlier: AnsweredTurns | None
    digests: list[str] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    untold: list[Conversation] = field(default_factory=list)
    is_open: bool = False

    @property
    def resumption(self) -> Resumption | None:
        """The state after the newest answer, for a process that does not have it; None if it is not known."""
        if not self.results or self.results[-1].state is None:
            return Resumption()
        saved = self.results[-1].state.saved
        return None if saved is None else Resumption(saved)

    def recorded(self, digest: str) -> StepResult | None:
        """Return the answer of the earlier run to this turn, if there is one and all turns before it were the same."""
        if self.earlier is None or len(self.results) >= len(self.earlier.digests):
            return None
        if self.earlier.digests[len(self.results)] != digest:
            self.earlier = None
            return None
        return self.earlier.results[len(self.results)]

    def note(self, digest: str, result: StepResult) -> None:
        """Record an answer."""
        if self.results and self.results[-1].state is not None:
            self.results[-1] = replace(self.results[-1], state=KeptState())
        self.digests.append(digest)
        self.results.append(result)


class Conversations:
    """Steps the conversations of a rollout, and records the answers, so that no turn is answered twice.

    A rollout that runs again gets the answers of its earlier run back if the conversation can continue after them: it
    ended, has no state, or its state was saved. Otherwise the environment takes its steps again, with the same seed; if
    its answer differs, the new answer counts and a warning is logged.

    A conversation whose state was lost with the environment's process or node resumes once per turn from the saved one.

    Args:
        environment: The environment.
        name: Its name, for messages.
        seed: Seed of the rollout.
        earlier: Conversations of an earlier run of the rollout, in the order they began.
        keeps_last: True if the answer that ends a conversation has it in its `info`, for functions that score it later.
    """

    def __init__(
        self,
        environment: EnvironmentClient,
        name: str,
        seed: int,
        earlier: Sequence[AnsweredTurns],
        *,
        keeps_last: bool = False,
    ) -> None:
        self._environment = environment
        self._keeps_last = keeps_last
        self._name = name
        self._seed = seed
        self._earlier: list[AnsweredTurns | None] = list(earlier)
        self._courses: dict[str, _Course] = {}

    @property
    def turns(self) -> tuple[AnsweredTurns, ...]:
        """Answers so far, in the order they began, with conversations of the earlier run that have
        not begun yet."""
        answered = [AnsweredTurns(tuple(each.digests), tuple(each.results)) for each in self._courses.values()]
        return (*(each for each in answered if each.digests), *(each for each in self._earlier if each is not None))

    async def step(self, conversation: Conversation) -> StepResult:
        """Return the answer to the newest turn; raise `EnvironmentFailed` if there is none, `InfrastructureFailed` if
        that is not the fault of the conversation, and `JudgeBudgetSpent` if a judge may not be asked again."""
        result = await self._step(conversation)
        if not self._keeps_last or not result.done:
            return result
        return replace(result, info={**result.info, CONVERSATION: conversation.plain()})

    async def _step(self, conversation: Conversation) -> StepResult:
        digest = turn_digest(conversation)
        course = self._courses.get(conversation.id) or self._begin(conversation.id, digest)
        conversation = replace(conversation, id=course.id, seed=course.seed)
        recorded = course.recorded(digest)
        if recorded is not None and course.earlier is not None and course.earlier.can_go_on:
            course.untold.append(conversation)
            course.note(digest, recorded)
            return recorded
        result = await self._answer(course, await self._told(course, conversation))
        if recorded is not None and _seen(result) != _seen(recorded):
            course.earlier = None
            if self._name not in _WARNED:
                _WARNED.add(self._name)
                _log.warning(
                    "environment %s answered otherwise when a rollout ran again, so the rollout differs from its first "
                    "run. Give the environment `save` and `restore`, or draw all that is random from the "
                    "conversation's seed",
                    self._name,
                )
        course.note(digest, result)
        return result

    async def release(self) -> None:
        """Release conversations that the environment did not end; a failure is logged and does not affect rollouts."""
        left = sorted(course.id for course in self._courses.values() if course.is_open)
        if not left:
            return
        try:
            await self._environment.abandon(left)
        except Exception as error:  # noqa: BLE001 - the rollout has ended either way
            _log.warning("environment did not release conversations %s: %s: %s", left, type(error).__name__, error)

    def _begin(self, id: str, digest: str) -> _Course:
        matching = [index for index, each in enumerate(self._earlier) if each is not None and each.digests[0] == digest]
        earlier = None
        if matching:
            earlier, self._earlier[matching[0]] = self._earlier[matching[0]], None
        course = self._courses[id] = _Course(id, _seed_of(self._seed, len(self._courses)), earlier)
        return course

    async def _told(self, course: _Course, conversation: Conversation) -> Conversation:
        """Return the conversation with the state that an environment needs to continue it."""
        untold, course.untold = course.untold, []
        if not untold:
            return conversation
        if course.resumption is not None:
            return replace(conversation, resumption=course.resumption)
        for earlier in untold:
            # These answers were given before the conversation took another course.
            await self._answer(course, earlier)
        return conversation

    async def _answer(self, course: _Course, conversation: Conversation) -> StepResult:
        course.is_open = True
        outcome = await self._environment.step(conversation)
        if isinstance(outcome, EnvironmentFailure) and outcome.fault == "lost" and course.resumption is not None:
            _log.info("a conversation resumes from its saved state: %s", outcome.reason)
            # A pool that was out of reach may still have the conversation with the earlier id.
            course.id = f"{course.id}+"
            resumption = course.resumption if course.results else None
            outcome = await self._environment.step(replace(conversation, id=course.id, resumption=resumption))
        if isinstance(outcome, EnvironmentFailure):
            course.is_open = False
            if outcome.fault == "budget":
                raise JudgeBudgetSpent(outcome.reason)
            is_infrastructure = outcome.fault in ("process", "lost")
            raise (InfrastructureFailed if is_infrastructure else EnvironmentFailed)(outcome.reason)
        course.is_open = not outcome.done
        return outcome


def turn_digest(conversation: Conversation) -> str:
    """Return a hexadecimal digest that is the same for equal turns after equal messages, in every process."""
    calls = [(call.name, call.arguments, call.error) for call in conversation.tool_calls]
    content = [conversation.turn, conversation.completion, conversation.truncated, conversation.messages, calls]
    text = json.dumps(content, default=repr, sort_keys=True)
    sampled = conversation.completion_ids
    tokens = b"" if sampled is None else np.ascontiguousarray(sampled, dtype=np.int32).tobytes()
    return hashlib.blake2b(tokens + text.encode(), digest_size=16).hexdigest()


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of a conversation of a rollout, below 2**63; independent of the seeds of the completions."""
    spread = np.random.SeedSequence([seed, number, _OF_ENVIRONMENTS])
    return int(spread.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _seen(result: StepResult) -> bytes:
    """Return the part of an answer that the policy or the loss sees."""
    return write_results([replace(result, state=None, info={})])
