"""Groups with the rewards of models that judge, as a loop collects them."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from rollouts_builder import make_prompt, make_turns

from rl_algos.judges.rubrics import Rubric
from rl_algos.rollouts.driver.judged import JudgedSource, ModelJudges
from rl_algos.rollouts.driver.watches import FailureWatch
from rl_core.data.ragged import Ragged
from rl_core.errors import RolloutsFailed
from rl_core.rollouts.group import SAID, RolloutGroup
from rl_core.rollouts.judging import JudgedReward
from rl_core.rollouts.pool import Evaluation

REWARDS = {
    "math": {"length": Rubric("helpful", weight=0.5), "words": Rubric("other")},
    "free": {"only": Rubric("other")},
}


class Judge:
    """Scores a rollout by the length of its last message; fails on `bad`."""

    def __init__(self, name):
        self.name, self.calls = name, []

    def judge(self, rewards, groups):
        self.calls.append([len(group) for group in groups])
        return [[self._rewards(rewards, rollout) for rollout in group] for group in groups]

    def _rewards(self, rewards, rollout):
        if rollout is None:
            return {}
        text = rollout.messages[-1]["content"]
        failed = JudgedReward(None, failure="it is not finite")
        return {name: failed if text == "bad" else JudgedReward(float(len(text))) for name in rewards}

    def usage(self):
        return {f"judge/{self.name}/requests": float(len(self.calls))}


class Source:
    """Gives groups once, and notes what becomes of them."""

    state = restore = close = None

    def __init__(self, groups):
        self.groups, self.aside, self.adopted = groups, [], 0

    def collect(self, num_groups, *, num_later=None):
        taken, self.groups = self.groups[:num_groups], self.groups[num_groups:]
        return taken

    def set_aside(self, groups, reason):
        self.aside += [(group, reason) for group in groups]

    def metrics(self):
        return {"generation/replicas": 1.0}

    def evaluate(self, prompts, sampling, *, num_generations=1):
        return Evaluation(self.groups)

    def adopt(self, update):
        self.adopted += 1


def group(number: int, *texts: str, environment: str = "math", statuses: dict[int, str] | None = None) -> RolloutGroup:
    prompt = replace(make_prompt(f"p{number}"), environment=environment)
    rollouts = []
    for place, text in enumerate(texts):
        rollout = make_turns(prompt, [1.0], status=(statuses or {}).get(place, "ok"))
        rollouts.append(replace(rollout, turns=(replace(rollout.turns[0], text=text),)))
    held = RolloutGroup.of(prompt, rollouts)
    said = [f'[{{"role": "assistant", "content": "{text}"}}]'.encode() for text in texts]
    column = Ragged.from_rows([np.frombuffer(each, np.uint8) for each in said], np.uint8)
    return replace(held, columns=held.columns.with_columns({SAID: column}))


def judged_source(groups, max_failed_share=1.0):
    phases = []

    @contextmanager
    def phase(name):
        phases.append(name)
        yield

    source, judges = Source(groups), {name: Judge(name) for name in ("helpful", "other")}
    watch = FailureWatch(max_failed_share, section="grpo")
    return JudgedSource(source, ModelJudges(judges, REWARDS), phase, watch), source, judges, phases


def test_all_groups_are_judged_at_once_by_each_model() -> None:
    groups = [group(0, "a", "bbb"), group(1, "cc", environment="free"), group(2, "dddd", "", environment="rule")]
    rollouts, _, judges, phases = judged_source([*groups, group(3, "x")])
    first = rollouts.collect(3)
    assert [each.rewards().tolist() for each in first] == [[1 + 0.5 + 1, 1 + 1.5 + 3], [1 + 2], [1.0, 1.0]]
    assert [each.rollouts.rewards[0] for each in first][:2] == [
        {"reward": 2.5, "length": 1.0, "words": 1.0},
        {"reward": 3.0, "only": 2.0},
    ]
    assert all(SAID not in each.columns for each in first)
    assert judges["helpful"].calls == [[2]]
    assert judges["other"].calls == [[2], [1]]
    assert phases == ["judging"]
    assert rollouts.metrics() == {
        "generation/replicas": 1.0,
        "judge/helpful/requests": 1.0,
        "judge/other/requests": 2.0,
    }


def test_training_and_evaluation_give_the_same_rewards_in_any_order() -> None:
    groups = [group(number, "a" * number, "b") for number in range(4)]
    expected = [each.rewards().tolist() for each in judged_source(groups)[0].collect(4)]
    for order in ([3, 1, 0, 2], [2, 3, 0, 1]):
        rollouts, *_ = judged_source([groups[place] for place in order])
        found = rollouts.evaluate([], None).groups if order[0] == 3 else [*rollouts.collect(1), *rollouts.collect(3)]
        assert [each.rewards().tolist() for each in found] == [expected[place] for place in order]


def test_a_group_that_is_set_aside_is_the_source_s() -> None:
    groups = [group(0, "a"), group(1, "b")]
    rollouts, source, *_ = judged_source(groups)
    _, second = rollouts.collect(2)
    rollouts.set_aside([second], "no signal")
    assert source.aside == [(groups[1], "no signal")]
    rollouts.adopt(None)
    assert source.adopted == 1


def test_rollouts_that_cannot_be_judged_fail_and_too_many_end_the_run() -> None:
    rollouts, *_ = judged_source([group(0, "a", "bad"), group(1, "c", "d", statuses={1: "failed"})], 0.6)
    first, second = rollouts.collect(2)
    assert first.rollouts.status == ("ok", "failed")
    assert first.rollouts.failure[1] == "the reward length could not be given: it is not finite"
    assert np.isnan(first.rewards()[1])
    assert second.rollouts.rewards[1] == {"reward": 1.0}
    rollouts, *_ = judged_source([group(0, "a", "bad")], 0.4)
    with pytest.raises(RolloutsFailed, match=r"more than grpo\.max_failed_share=0\.4 allows: 1 x the reward length"):
        rollouts.collect(1)


def test_a_rollout_in_which_nothing_was_said_is_shown_as_such() -> None:
    held = group(0, "a")
    said = Ragged.from_rows([np.frombuffer(b"[]", np.uint8)], np.uint8)
    held = replace(held, columns=held.columns.with_columns({SAID: said}))
    shown = []

    class Deaf(Judge):
        def _rewards(self, rewards, rollout):
            shown.append(rollout.messages)
            return {name: JudgedReward(None, failure="nothing was said") for name in rewards}

    [judged] = ModelJudges({"other": Deaf("other")}, REWARDS).judged(
        [replace(held, prompt=replace(held.prompt, environment="free"))]
    )
    assert shown == [()]
    assert judged.rollouts.status == ("failed",)
