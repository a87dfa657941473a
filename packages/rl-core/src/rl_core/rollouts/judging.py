"""Judges: models that score a policy's responses, their questions and their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_core.errors import RLError
from rl_core.rollouts.rollout import Message


class JudgeFailed(RLError):
    """Raised if a judge gave no verdict that can be read, also when it was asked again. The rollout fails and trains
    nothing."""


class JudgeBudgetSpent(RLError):
    """Raised if a judge may not be asked again, because the tokens of its budget are spent. The run ends, and can be
    resumed with a larger budget."""


@dataclass(frozen=True)
class Question:
    """A question to a language model that judges.

    Args:
        messages: The conversation whose next message is the verdict.
        form: JSON schema of the verdict; None for free text.
        draw: Number of the draw: another one gives another verdict to the same question.
    """

    messages: tuple[Message, ...]
    form: Mapping[str, Any] | None = None
    draw: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of the question, in hexadecimal."""
        content = [list(map(dict, self.messages)), self.form, self.draw]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class JudgeVerdict:
    """A judge's answer to a question, or the reason that there is none.

    Args:
        judge: Name of the judge.
        question: Digest of the question.
        text: Text of the answer.
        value: The answer as the form has it; the text if there is no form.
        failure: Reason in one line that there is no answer; empty if there is one.
        num_tokens: Number of tokens of question and answer, as the judge counts them.
        is_cached: True if nobody was asked.
    """

    judge: str
    question: str
    text: str = ""
    value: Any = None
    failure: str = ""
    num_tokens: int = 0
    is_cached: bool = False


@dataclass(frozen=True)
class JudgedRollout:
    """A rollout as judges see it.

    Args:
        prompt: Messages of the prompt.
        messages: Messages after the prompt: the policy's turns without their thoughts, and the observations between
            them.
        info: Fields of the prompt's row.
    """

    prompt: tuple[Message, ...]
    messages: tuple[Message, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        """Number of the policy's turns."""
        return sum(message.get("role") == "assistant" for message in self.messages)


@dataclass(frozen=True)
class JudgedReward:
    """The reward of a rollout by a judge.

    Args:
        value: The reward; None if the rollout fails.
        turns: Rewards of its turns, in order, which add up to the value; empty if they were not judged one by one.
        failure: Reason in one line that there is no reward; empty if there is one.
        verdicts: Records for people: judge, question, answer, value and whether nobody was asked.
        info: Recorded with the rollout, as `rl_core.rollouts.environment.StepResult.info` is.
    """

    value: float | None
    turns: tuple[float, ...] = ()
    failure: str = ""
    verdicts: tuple[Mapping[str, Any], ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


class JudgeClient(Protocol):
    """Judges of a run as a process reaches them.

    Attributes:
        names: Names of the judges that can be asked.
        give_scores: True if they are reward models. A question is then a conversation, and its verdict the score of
            the last message.
    """

    names: tuple[str, ...]
    give_scores: bool

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        """Return the verdicts of a judge, in order; those that it could not give have a failure.

        Raises:
            JudgeBudgetSpent: If its budget is spent.
            WorkerDied: If the process of the judges has ended for good.
        """


class Judge(Protocol):
    """A judge as a reward function sees it, which takes it by the name of its section: `judges.NAME` is the parameter
    `NAME`.

    Limits, budget, cache and records are below it.
    """

    async def ask(self, prompt: str | Sequence[Message], form: Mapping[str, Any] | None = None) -> Any:
        """Ask a language model.

        A reward model cannot be asked, and a language model has no scores: the other method raises a `JudgeFailed`
        with the remedy.

        Args:
            prompt: Question, or a conversation that ends with it.
            form: JSON schema of the answer; None for free text.

        Returns:
            The answer as the form has it; its text without a form.

        Raises:
            JudgeFailed: If there is no answer that can be read.
        """

    async def score(self, messages: Sequence[Message]) -> float:
        """Score the last message of a conversation by a reward model.

        Args:
            messages: The conversation, of `role` and `content`. The last message is the policy's.

        Returns:
            The score, as the reward model gives it to a rollout with these messages.

        Raises:
            JudgeFailed: If there is no score: the chat template refuses the conversation, or the score is not finite.
        """
