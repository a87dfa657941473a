"""Environments tried on a few conversations before a run starts, so that a broken one is found at once."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import re
import sys
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rl_core.environments import child, worker
from rl_core.environments.instance import EnvironmentInstance
from rl_core.environments.pool import EnvironmentPool
from rl_core.errors import WorkerDied, WorkerError
from rl_core.rollouts.environment import Conversation, EnvironmentFailure
from rl_core.rollouts.judging import JudgeVerdict, Question

logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_S = 5.0
_SLOW = "trying the environment %s on the first rows takes more than %g s: its process is still starting or scoring"
"""Seconds after which a log line reports that an environment's trial is still in progress."""

_REMEDY = "a reward is a number for every response, such as 0.0 for one that it cannot read"
_MESSAGES_EXPECTED = re.compile("string indices must be integers|'str' object has no attribute")
"""Errors of a function that takes strings for messages."""
_WRONG_TYPE = re.compile("TypeError|AttributeError")


@dataclass(frozen=True)
class Attempt:
    """A row of the data with a response that a policy might give.

    Args:
        place: Place of the row, such as `prompts.jsonl, line 3`.
        conversation: Conversation with the response as its newest turn.
    """

    place: str
    conversation: Conversation

    @property
    def source(self) -> str:
        """The file of the row, or its place if it is not from a file."""
        return self.place.rpartition(", ")[0] or self.place

    def __str__(self) -> str:
        return f"{self.place}, with the response {self.conversation.completion!r:.60}"


@dataclass(frozen=True)
class Trial:
    """An environment and the attempts that it is tried on.

    Args:
        instance: The environment.
        attempts: Attempts in order; the attempts at one row are adjacent.
        judges: Names of the judges that its reward functions may ask. They are not asked before a run starts.
        reward_models: Names of the reward models of the run.
        is_scored: True if its functions may ask these instead.
    """

    instance: EnvironmentInstance
    attempts: Sequence[Attempt]
    judges: tuple[str, ...] = ()
    reward_models: tuple[str, ...] = ()
    is_scored: bool = False

    def remedy_of(self, reason: str) -> str:
        """Return what to do about a function that asks for a reward model by name, as a sentence; empty for others."""
        for name in self.reward_models:
            if f"asks for {name!r}" in reason:
                return (
                    f" judges.{name} is a reward model, which only functions under env.NAME.rewards can ask, as in "
                    f"env.NAME.rewards.{name}=file.py:function"
                )
        return ""


class UnaskedJudges:
    """Judges that give no verdict; see `rl_core.rollouts.judging.JudgeClient`.

    Args:
        names: Their names.
        give_scores: True if they are reward models.

    Attributes:
        num_asked: Number of questions.
    """

    def __init__(self, names: tuple[str, ...], *, give_scores: bool = False) -> None:
        self.names, self.give_scores = names, give_scores
        self.num_asked = 0

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        self.num_asked += len(questions)
        reason = f"{judge} is not asked before the run starts"
        return [JudgeVerdict(judge, question.digest, failure=reason) for question in questions]


@dataclass
class Verdict:
    """The outcome of trials.

    Args:
        problems: Why environments cannot be used.
        warnings: Responses that would fail their rollout.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def try_out(trials: Sequence[Trial]) -> Verdict:
    """Build each environment in its own process and have it answer its attempts, as in a run.

    An environment is refused if it cannot be built, hangs, ends its process, returns a value that is not a reward, or
    raises on every response to a row. If it raises on some of them, there is a warning.
    """

    async def tried() -> Verdict:
        verdict = Verdict()
        await asyncio.gather(*(_try_one(trial, verdict) for trial in trials))
        return verdict

    return run_quietly(tried())


def run_quietly(tried: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that calls environments, without records of their output and their end in the log: its result
    shows that.
    """
    loggers = [logging.getLogger(module.__name__) for module in (child, worker)]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_in_loop = False
    else:
        is_in_loop = True
    try:
        if not is_in_loop:
            return asyncio.run(tried)
        # A notebook runs its cells in a loop, and a thread has only one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, tried).result()
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def main() -> None:
    """Try pickled trials from standard input, and write the verdict as JSON on the last line of standard output."""
    verdict = try_out(pickle.load(sys.stdin.buffer))
    print(f"\n{json.dumps([verdict.problems, verdict.warnings])}")  # noqa: T201 - the answer to the other process


async def _try_one(trial: Trial, verdict: Verdict) -> None:
    instance, config = trial.instance, trial.instance.config
    judges = UnaskedJudges(trial.reward_models if trial.is_scored else trial.judges, give_scores=trial.is_scored)
    one = config.model_copy(update={"num_workers": 1})
    pool = EnvironmentPool.of(instance.environment, one, name=instance.label, judges=judges)
    slow = asyncio.get_running_loop().call_later(SLOW_S, logger.info, _SLOW, instance.label, SLOW_S)
    try:
        await _attempt_all(pool, trial, judges, verdict)
    except WorkerError as error:
        kind = "" if error.kind == ValueError.__name__ else f"{error.kind}: "
        verdict.problems.append(f"environment {instance.label} cannot be built: {kind}{error.message}")
    except WorkerDied as error:
        verdict.problems.append(str(error))
    finally:
        slow.cancel()
        await pool.close()


async def _attempt_all(pool: EnvironmentPool, trial: Trial, judges: UnaskedJudges, verdict: Verdict) -> None:
    raised: dict[str, list[str]] = {}
    remedy = ""
    num_attempts: dict[str, int] = {}
    for attempt in trial.attempts:
        num_attempts[attempt.place] = num_attempts.get(attempt.place, 0) + 1
        num_asked = judges.num_asked
        [outcome] = await pool.step([attempt.conversation])
        if judges.num_asked > num_asked:
            # What follows from a verdict is not known.
            continue
        if not isinstance(outcome, EnvironmentFailure):
            names = list(outcome.reward) if isinstance(outcome.reward, Mapping) else []
            said = (
                f"environment {trial.instance.label} returns {', '.join(names)}: their sum is trained on. To train on "
                "the score only, call it `reward`; record other numbers with log_metric"
            )
            # Elsewhere `score` is the reward and further entries are not, so adding them is probably not meant.
            if "score" in names and len(names) > 1 and "reward" not in names and said not in verdict.warnings:
                verdict.warnings.append(said)
            continue
        said = f"{outcome.reason.removesuffix('.')}. It was tried on {attempt}"
        if outcome.fault != "raised":
            verdict.problems.append(f"{said}.{trial.remedy_of(outcome.reason)}")
            return
        raised.setdefault(attempt.place, []).append(said)
        if trial.instance.is_own and not remedy:
            text = raised_remedy(outcome.reason, attempt)
            remedy = f" {text[:1].upper()}{text[1:]}."
    whole = [said[0] for place, said in raised.items() if len(said) == num_attempts[place]]
    if whole:
        verdict.problems.append(f"{whole[0]}; on others it raises too.{remedy}")
    elif raised:
        first = next(iter(raised.values()))[0]
        verdict.warnings.append(f"{first}; a rollout with such a response fails.{remedy}")


def raised_remedy(reason: str, attempt: Attempt) -> str:
    """Return the remedy for a function of the user that raised, as a clause.

    Args:
        reason: The error.
        attempt: The conversation that it was called with.
    """
    if not attempt.conversation.is_text or not _MESSAGES_EXPECTED.search(reason):
        return compared_as_text(attempt, reason) or _REMEDY
    return (
        f"prompts and completions are strings here, because the prompts of {attempt.source} are strings. Use them as "
        "strings, or write the prompts as messages (a list of role and content) to get messages"
    )


def compared_as_text(attempt: Attempt, reason: str = "") -> str:
    """Return the remedy for a column that is not text and that a reward compares with text; empty if there is none.

    Args:
        attempt: The conversation with the row.
        reason: The error, which contains the type; without one, the column is `answer`.
    """
    if reason and not _WRONG_TYPE.search(reason):
        return ""
    for name, value in sorted(attempt.conversation.info.items(), key=lambda column: column[0] != "answer"):
        kind = type(value).__name__
        named = re.search(rf"\b{kind}\b(?!\()", reason) if reason else name == "answer"
        if named and isinstance(value, int | float | list | dict):
            text = f"str({name})" if isinstance(value, int | float) else "the text in it"
            return f"`{name}` is a{'n' * (kind == 'int')} {kind} in {attempt.source}; compare with {text}"
    return ""


def attempts_on(
    place: str, row_id: str, messages: Sequence[Any], info: Any, responses: Sequence[str] = (), *, is_text: bool = False
) -> list[Attempt]:
    """Return a row with responses as a policy may give them: a sentence with the answer if the row has one, only the
    answer, and nothing; then further ones.

    Args:
        place: Place of the row, such as `prompts.jsonl, line 3`.
        row_id: ID of the row; its conversations are numbered `ROW_ID/0`, `ROW_ID/1` and so on.
        messages: Messages of the prompt.
        info: Fields of the row; the answer is read from `answer` and is 4 without this field.
        responses: Further responses to try.
        is_text: True if the row gives the prompt as plain text.
    """
    answer = str(info.get("answer", 4))
    return [
        Attempt(
            place,
            Conversation(
                f"{row_id}/{index}",
                (*messages, {"role": "assistant", "content": text}),
                info,
                completion=text,
                completion_ids=np.frombuffer(text.encode(errors="surrogatepass"), dtype=np.uint8).astype(np.int32),
                is_text=is_text,
            ),
        )
        for index, text in enumerate((f"The answer is {answer}.", answer, "", *responses))
    ]


def answer_forms(info: Any) -> list[str]:
    """Return the answer of a row in the usual marks; nothing if the row has no answer."""
    if "answer" not in info:
        return []
    return [form.replace("ANSWER", str(info["answer"])) for form in ("\\boxed{ANSWER}", "<answer>ANSWER</answer>")]
