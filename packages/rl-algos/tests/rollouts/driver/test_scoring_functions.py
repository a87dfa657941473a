"""Reward functions that ask reward models, called when the rollouts of a step have ended."""

import json
from dataclasses import replace

import pytest
from rollouts_builder import make_prompt, make_turns

from rl_algos.judges.judged import CONVERSATION
from rl_algos.rollouts.driver.judged import ModelJudges
from rl_algos.rollouts.driver.scoring_functions import ScoringFunctions
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.instance import EnvironmentInstance
from rl_core.environments.rewards import RewardPart, RewardSum
from rl_core.errors import WorkerDied
from rl_core.plugins import Requirement
from rl_core.rollouts.environment import Conversation
from rl_core.rollouts.group import RECORD, RolloutGroup
from rl_core.rollouts.judging import JudgedReward
from rl_core.user_code import FromFile

FUNCTIONS = """
import asyncio
import os


async def margin(response, messages, answer, helpful, log_metric):
    if response == "crash":
        os._exit(3)
    said = [{**messages[-1], "content": text} for text in (response, answer)]
    own, best = await asyncio.gather(*(helpful.score([*messages[:-1], each]) for each in said))
    log_metric("best", best)
    return own - best


async def listed(completions, helpful):
    scores = await asyncio.gather(*(helpful.score(each) for each in completions))
    return [None if score == 2.0 else score for score in scores]
"""


class Judge:
    """Scores a conversation by the length of its last message."""

    def __init__(self):
        self.calls, self.broken = [], False

    def judge(self, rewards, groups):
        if self.broken:
            raise WorkerDied("a rank of judge_helpful died")
        self.calls.append([[len(rollout.prompt) for rollout in group] for group in groups])
        [name] = rewards
        return [[{name: self._reward(rollout.messages[-1]["content"])} for rollout in group] for group in groups]

    @staticmethod
    def _reward(text):
        return JudgedReward(None, failure="it is not finite") if text == "bad" else JudgedReward(float(len(text)))

    def usage(self):
        return {}


def group(number: int, *texts: str) -> RolloutGroup:
    prompt = replace(make_prompt(f"p{number}", answer="four"), environment="math")
    rollouts = []
    for text in texts:
        messages = (*prompt.messages, {"role": "assistant", "content": text})
        kept = Conversation("a", messages, {}, text, num_prompt_messages=1).plain()
        rollouts.append(replace(make_turns(prompt, [1.0]), info={CONVERSATION: kept}))
    return RolloutGroup.of(prompt, rollouts)


@pytest.fixture
def functions(tmp_path):
    """A function that makes the functions of an environment by name, which are closed at the end."""
    (tmp_path / "graded.py").write_text(FUNCTIONS)
    made = []

    def make(judge, *names, **settings):
        parts = tuple(RewardPart(name, FromFile.read(f"{tmp_path}/graded.py:{name}"), 0.5) for name in names)
        config = EnvironmentConfig(num_workers=2, **settings)
        instance = EnvironmentInstance("math", RewardSum(None, parts), config, Requirement("rl-core"))
        made.append(ScoringFunctions({"math": instance}, {"helpful": judge}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_functions_score_with_a_model_and_their_verdicts_are_recorded(functions) -> None:
    judge = Judge()
    judges = ModelJudges({"helpful": judge}, {}, functions(judge, "margin", max_batch=4))
    groups = judges.judged([group(0, "a", "bbbbbb"), group(1, "ccc")])
    assert [each.rollouts.rewards for each in groups] == [
        ({"reward": 1.0 - 1.5, "margin": -3.0}, {"reward": 1.0 + 1.0, "margin": 2.0}),
        ({"reward": 1.0 - 0.5, "margin": -1.0},),
    ]
    assert [each["best"] for each in groups[0].rollouts.info] == [4.0, 4.0]
    records = [json.loads(record.tobytes()) for each in groups for record in each.records.ragged(RECORD)]
    assert all(CONVERSATION not in record["info"] for record in records)
    assert [[each["value"] for each in record["verdicts"]] for record in records] == [[1, 4], [6, 4], [3, 4]]
    # The answer is scored once, because all prompts are equal, and each conversation by itself.
    assert sum(len(each) for each in judge.calls) == 4
    assert all(lengths == [1] for call in judge.calls for lengths in call)
    assert sum(each["cached"] for record in records for each in record["verdicts"]) == 2


def test_rewards_do_not_depend_on_the_order_or_on_how_many_are_called_at_once(functions) -> None:
    groups = [group(number, "a" * number, "bad", "bb") for number in range(1, 5)]
    expected = None
    for order, max_batch in ([0, 1, 2, 3], 1), ([2, 0, 3, 1], 8):
        judge = Judge()
        judges = ModelJudges({"helpful": judge}, {}, functions(judge, "margin", "listed", max_batch=max_batch))
        judged = judges.judged([groups[place] for place in order])
        found = {each.prompt.id: (each.rollouts.rewards, each.rollouts.status) for each in judged}
        expected = expected or found
        assert found == expected
    rewards, status = expected["p3"]
    assert status == ("ok", "failed", "ok")
    # `listed` does not apply to the last one.
    assert rewards[0] == {"reward": 1.0 + 0.5 * (3 - 4) + 0.5 * 3, "margin": -1.0, "listed": 3.0}
    assert rewards[2] == {"reward": 1.0 + 0.5 * (2 - 4), "margin": -2.0}


def test_a_function_that_ends_its_process_costs_its_own_rollout(functions) -> None:
    judge = Judge()
    judges = ModelJudges({"helpful": judge}, {}, functions(judge, "margin"))
    [first, second] = judges.judged([group(0, "a", "crash"), group(1, "b")])
    assert first.rollouts.status == ("ok", "failed")
    assert "exit code 3" in first.rollouts.failure[1]
    assert second.rollouts.rewards == ({"reward": 1.0 - 1.5, "margin": -3.0},)


def test_a_model_that_dies_ends_the_run(functions) -> None:
    judge = Judge()
    judge.broken = True
    scored = functions(judge, "margin")
    with pytest.raises(WorkerDied, match="judge_helpful died"):
        ModelJudges({"helpful": judge}, {}, scored).judged([group(0, "a")])
    judge.broken = False
    [judged] = ModelJudges({"helpful": judge}, {}, scored).judged([group(0, "a")])
    assert judged.rollouts.rewards[0]["margin"] == -3.0
