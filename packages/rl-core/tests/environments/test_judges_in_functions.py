"""Reward functions that take judges by name: their process asks through the pool, which believes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence

import pytest
from pools import failures, pool, turn

from rl_core.environments.reward_function import as_environment
from rl_core.environments.rewards import VERDICTS
from rl_core.errors import WorkerDied, WorkerError
from rl_core.rollouts.environment import EnvironmentFailure, StepResult
from rl_core.rollouts.judging import JudgeBudgetSpent, JudgeVerdict, Question


class ScriptedJudges:
    """Judges that do what a question says."""

    names = ("critic", "strict")
    give_scores = False

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked: list[tuple[str, str]] = []
        self._seconds = seconds

    async def ask(self, judge: str, questions: Sequence[Question]) -> list[JudgeVerdict]:
        await asyncio.sleep(self._seconds)
        return [self._verdict(judge, question) for question in questions]

    def _verdict(self, judge: str, question: Question) -> JudgeVerdict:
        text = str(question.messages[-1]["content"])
        self.asked.append((judge, text))
        if text == "fail":
            return JudgeVerdict(judge, question.digest, failure="the verdict cannot be read: maybe")
        if text == "dead":
            raise WorkerDied("the process of the judges ended")
        if text == "spent":
            raise JudgeBudgetSpent("judges.critic.limits.max_total_tokens is spent")
        value = "x" * 100_000 if text == "long" else float(len(text))
        return JudgeVerdict(judge, question.digest, str(value), value)


def stepped(function: str, *completions: str, judges: ScriptedJudges | None = None, **settings):
    async def run():
        async with pool(f"judge_functions:{function}", judges=judges or ScriptedJudges(), **settings) as envs:
            return await envs.step([turn(index, text) for index, text in enumerate(completions)])

    return asyncio.run(run())


def rewards(outcomes) -> list:
    return [each.reward if isinstance(each, StepResult) else each.reason for each in outcomes]


def test_a_function_asks_several_judges_at_once() -> None:
    judges = ScriptedJudges()
    [found] = stepped("of_both", "abc", judges=judges)
    assert found.reward == {"part0": 4.0, "part1": 4.0, "part2": 4.0, "part3": 4.0}
    assert sorted(judges.asked) == [("critic", "abc0"), ("critic", "abc1"), ("strict", "abc0"), ("strict", "abc1")]


def test_a_reward_model_gives_scores_and_a_language_model_answers() -> None:
    models = ScriptedJudges()
    models.give_scores = True
    [found, alone] = stepped("scored", "abc", "", judges=models)
    assert (found.reward, alone.reward) == (3.0, 0.0)
    [record] = found.info[VERDICTS]
    question = Question(({"role": "assistant", "content": "abc"},))
    assert record == {"judge": "critic", "question": question.digest, "answer": "", "value": 3.0, "cached": False}
    [asked] = stepped("score", "abc", judges=models)
    assert "critic is a reward model, which has scores: await critic.score(messages)" in asked.reason
    [scored] = stepped("scored", "abc")
    assert "critic is a language model, which has no scores: await critic.ask(prompt)" in scored.reason


def test_verdicts_are_recorded_with_the_conversation_that_they_are_on() -> None:
    outcomes = stepped("of_both", "abc", "d", max_batch=2)
    found = [[each["value"] for each in outcome.info[VERDICTS]] for outcome in outcomes]
    assert found == [[4.0] * 4, [2.0] * 4]
    assert all(VERDICTS not in each.info for each in stepped("listed", "a", "bb", max_batch=2))


def test_functions_of_lists_and_classes_ask_too() -> None:
    assert rewards(stepped("listed", "a", "bb", "ccc", max_batch=3)) == [1.0, 2.0, 3.0]

    async def play() -> None:
        async with pool("judge_functions:Game", judges=ScriptedJudges()) as envs:
            [first] = await envs.step([turn("g", "abcd")])
            [second] = await envs.step([dataclasses.replace(turn("g", "ab"), turn=1)])
            assert (first.reward, first.done, second.reward, second.done) == (4.0, False, 2.0, True)

    asyncio.run(play())


def test_a_verdict_that_fails_costs_its_own_rollout_and_may_be_caught() -> None:
    outcomes = stepped("score", "ok", "fail", "good", "dead", max_batch=4)
    assert rewards(outcomes)[::2] == [2.0, 4.0]
    assert failures(outcomes) == [1, 3]
    assert outcomes[1] == EnvironmentFailure(
        "environment judge_functions:score: score: the verdict cannot be read: maybe", "raised"
    )
    assert "the process of the judges ended" in outcomes[3].reason
    [caught] = stepped("lenient", "fail")
    assert caught.reward["reward"] == -1.0


def test_a_spent_budget_is_a_fault_of_its_own() -> None:
    spent, healthy = stepped("lenient", "spent", "fine")
    assert isinstance(spent, EnvironmentFailure)
    assert spent.fault == "budget"
    assert "max_total_tokens" in spent.reason
    assert healthy.reward == 4.0


def test_waiting_for_a_judge_takes_nothing_from_the_deadline() -> None:
    # The turn gives way to none that waits either, because its questions would be asked again.
    judges = ScriptedJudges(seconds=1.2)
    begun = time.monotonic()
    assert rewards(stepped("score", "a", "bb", judges=judges, deadline_s=1.0)) == [1.0, 2.0]
    assert len(judges.asked) == 2
    assert time.monotonic() - begun < 60


def test_an_answer_that_nobody_waits_for_is_ignored() -> None:
    async def run() -> None:
        judges = ScriptedJudges(seconds=0.1)
        async with pool("judge_functions:impatient", judges=judges) as envs:
            for number in range(3):
                [found] = await envs.step([turn(number, "abc")])
                assert found.reward == 0.25
            assert (await envs.health())["num_restarts"] == 0

    asyncio.run(run())


def test_a_hostile_process_costs_its_own_rollouts() -> None:
    said = {
        "flood": "asked judges more than 256 questions",
        "deaf": "deadline",
        "garbage": "malformed",
        "roles": "messages of role and content",
        "form": "not a JSON schema",
        "unknown": "there is no judge 'other'",
        "object": "holds a object",
        "long": "the limit is 1,048,576",
    }
    outcomes = stepped("hostile", "ok", *said, "late", "ok", deadline_s=3.0, workers=2)
    assert rewards(outcomes)[0] == rewards(outcomes)[-1] == rewards(outcomes)[-2] == 1.0
    for (_, reason), outcome in zip(said.items(), outcomes[1:-2], strict=True):
        assert isinstance(outcome, EnvironmentFailure)
        assert reason in outcome.reason


def test_a_judge_needs_an_async_function_and_a_name_of_its_own() -> None:
    judges = dict.fromkeys(("critic",), None)

    async def ambiguous(response, answer, critic):
        return 1.0

    with pytest.raises(ValueError, match="takes the judge critic, which is asked with `await`; make it an async"):
        as_environment(lambda response, critic: 0.0, judges)
    with pytest.raises(WorkerError, match="takes the judge critic"):
        stepped("sync", "a")
    with pytest.raises(ValueError, match="both a judge and a field of the row; rename the judge"):
        as_environment(ambiguous, {"answer": None, "critic": None}).step([turn(0, "a")], [None])
