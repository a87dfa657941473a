"""Rewards by judges, added to rollouts in a rollout worker and to groups in the driver."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rollouts_builder import make_prompt, make_rollout, make_turns

from rl_algos.judges.judged import group_with_rewards, judged_rollout, with_rewards
from rl_core.rollouts.group import LOSS_MASK, RECORD, SAID, RolloutGroup, RolloutReport
from rl_core.rollouts.judging import JudgedReward
from rl_core.rollouts.record import rollout_record
from rl_core.rollouts.rollout import SegmentContext, Turn

PROMPT = make_prompt(answer="4")
WEIGHTS = {"nice": 0.5, "style": 2.0}
VERDICT = {"judge": "critic", "question": "q", "answer": "a", "value": 1.0, "cached": False}


def rewards(nice=1.0, turns=(), failure="") -> dict[str, JudgedReward]:
    return {
        "nice": JudgedReward(None if failure else nice, failure=failure, verdicts=(VERDICT,)),
        "style": JudgedReward(sum(turns) or 0.25, turns=tuple(turns)),
    }


CASES = {
    "one turn": (make_turns(PROMPT, [1.0]), rewards()),
    "three turns": (make_turns(PROMPT, [1.0, 0.0, 2.0], late=0.5), rewards()),
    "by turn": (make_turns(PROMPT, [1.0, 0.0, 2.0]), rewards(turns=(0.1, 0.2, 0.4))),
    "a verdict fails": (make_turns(PROMPT, [1.0, 0.0]), rewards(failure="judge critic: it cannot be read")),
    "too few turns": (make_turns(PROMPT, [1.0, 0.0]), rewards(turns=(0.1, 0.2, 0.3))),
    "a name twice": (replace(make_turns(PROMPT, [1.0]), rewards={"reward": 1.0, "nice": 1.0}), rewards()),
}


@pytest.mark.parametrize("case", CASES)
def test_workers_and_the_driver_add_the_same_rewards(case: str) -> None:
    rollout, given = CASES[case]
    expected = with_rewards(PROMPT, rollout, given, WEIGHTS)
    held = RolloutGroup.of(PROMPT, [rollout, rollout])
    group = group_with_rewards(
        replace(held, columns=held.columns.with_columns({SAID: held.columns.ragged(RECORD)})), [given, {}], WEIGHTS
    )
    assert SAID not in group.columns
    judged, untouched = group.rollouts
    same = ("rewards", "status", "failure", "num_sampled", "spans")
    report = RolloutReport.of(expected)
    assert [getattr(judged, name) for name in same] == [getattr(report, name) for name in same]
    if expected.status != "failed":
        assert judged.turns == report.turns
    assert untouched == held.rollouts[1]
    by_driver, by_worker = (
        json.loads(bytes(each)) for each in (group.columns.ragged(RECORD)[0], rollout_record(PROMPT, 0, expected))
    )
    names = ("rewards", "status", "failure", "verdicts", "turns", "num_sampled")
    assert [by_driver[name] for name in names] == [by_worker[name] for name in names]
    masks = [int(row.sum()) for row in group.columns.ragged(LOSS_MASK)]
    assert masks == [expected.num_sampled, rollout.num_sampled]


def test_rewards_are_weighted_and_credited_to_turns() -> None:
    rollout, given = CASES["by turn"]
    judged = with_rewards(PROMPT, rollout, given, WEIGHTS)
    assert judged.rewards == pytest.approx({"reward": 3.0 + 0.5 + 2.0 * 0.7, "nice": 1.0, "style": 0.7})
    assert [turn.late_reward for turn in judged.turns] == pytest.approx([0.2, 0.4, 0.8 + 0.5])
    assert judged.turns[0].rewards == {"reward": 1.0, "style": 0.1}
    assert judged.verdicts == (VERDICT,)


def test_a_rollout_without_a_verdict_trains_nothing() -> None:
    rollout, given = CASES["a verdict fails"]
    failed = with_rewards(PROMPT, replace(rollout, agent="white", peers="x", play=3), given, WEIGHTS)
    assert (failed.status, failed.rewards, failed.num_sampled) == ("failed", {}, 0)
    assert failed.failure == "the reward nice could not be given: judge critic: it cannot be read"
    assert (failed.agent, failed.peers, failed.play, failed.verdicts) == ("white", "x", 3, (VERDICT,))
    assert len(failed.turns) == 2


def test_judges_see_turns_without_thoughts_and_what_came_between() -> None:
    turns = (Turn("<think>hm</think> 4", ({"role": "tool", "content": "wrong"},), {}), Turn("no</think>5", None, {}))
    shown = judged_rollout(PROMPT, replace(make_rollout(PROMPT, 0.0), turns=turns))
    assert shown is not None
    assert [message["content"] for message in shown.messages] == ["4", "wrong", "5"]
    assert (shown.prompt, shown.info, shown.num_turns) == (PROMPT.messages, {"answer": "4"}, 2)
    cut = replace(make_rollout(PROMPT, 0.0), turns=(Turn("still thinking", None, {}),))
    assert judged_rollout(PROMPT, cut, "<think>").messages[0]["content"] == ""
    assert judged_rollout(PROMPT, make_rollout(PROMPT, 0.0, status="failed")) is None


def test_judges_see_an_agent_s_segments_in_order_without_what_it_says_in_the_policy_s_name() -> None:
    system, asked = {"role": "system", "content": "be brief"}, {"role": "user", "content": "again"}
    said = {"role": "assistant", "content": "not the policy's"}
    contexts = (
        SegmentContext((*PROMPT.messages, system), (), 1, call=1),
        SegmentContext((system, said, asked), (), 1, call=2),
    )
    turns = (Turn("first", None, {}), Turn("second", None, {}))
    rollout = replace(
        make_rollout(PROMPT, 0.0), turns=turns, contexts=contexts, segments=(2, 3), tokens=np.arange(5, dtype=np.int32)
    )
    shown = judged_rollout(PROMPT, rollout)
    assert [message["content"] for message in shown.messages] == ["be brief", "first", "be brief", "again", "second"]
