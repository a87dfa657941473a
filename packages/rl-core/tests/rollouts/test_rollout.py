from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rollouts.group import RolloutGroup, RolloutReport, RolloutReports
from rl_core.rollouts.record import MAX_CHARACTERS, MAX_CONTEXT, MAX_STRING, rollout_record, segments_of, turns_of
from rl_core.rollouts.rollout import Prompt, Rollout, SegmentContext, Turn, WeightSpan

PROMPT = Prompt(
    "p1", ({"role": "user", "content": "2+2="},), np.array([5, 6, 7], dtype=np.int64), "math", {"answer": "4"}
)


def rollout(**changes: Any) -> Rollout:
    made = Rollout(
        prompt_id="p1",
        tokens=np.array([5, 6, 7, 8, 9], dtype=np.int32),
        loss_mask=np.array([0, 0, 0, 1, 1], dtype=np.uint8),
        generation_logprobs=np.array([0, 0, 0, -0.5, -0.1], dtype=np.float32),
        spans=(WeightSpan(3, 2),),
        turns=(),
        rewards={"reward": 0.5, "format": 0.1},
        stop_reason="stop",
    )
    return replace(made, **changes)


def test_a_failed_rollout_trains_nothing_and_says_why() -> None:
    failed = Rollout.failed(PROMPT, "the environment hung")
    assert failed.status == "failed"
    assert failed.failure == "the environment hung"
    assert failed.tokens.tolist() == [5, 6, 7]
    assert failed.tokens.dtype == np.int32
    assert failed.num_sampled == 0
    assert failed.loss_mask.shape == failed.generation_logprobs.shape == failed.tokens.shape
    assert failed.reward == 0.0


def test_the_reward_is_the_one_of_that_name() -> None:
    assert rollout().reward == 0.5
    assert rollout(rewards={}).reward == 0.0
    assert rollout().num_sampled == 2


def test_failed_rollouts_count_in_no_statistic_of_their_group() -> None:
    group = RolloutGroup.of(PROMPT, [rollout(), Rollout.failed(PROMPT, "x"), rollout(status="truncated")])
    rewards = group.rewards()
    assert rewards.dtype == np.float64
    assert np.isnan(rewards).tolist() == [False, True, False]
    assert np.nanmean(rewards) == 0.5


def test_routing_of_a_failed_rollout_is_unknown_and_of_a_group_that_failed_there_is_none() -> None:
    experts = np.arange(30, dtype=np.int16).reshape(5, 3, 2)
    group = RolloutGroup.of(PROMPT, [Rollout.failed(PROMPT, "x"), rollout(routed_experts=experts)])
    routed = group.columns.ragged("routed_experts")
    assert routed.values.dtype == np.int16
    assert (routed[0] == np.full((3, 3, 2), -1)).all()
    assert (routed[1] == experts).all()
    assert "routed_experts" not in RolloutGroup.of(PROMPT, [Rollout.failed(PROMPT, "x")]).columns
    assert "routed_experts" not in RolloutGroup.of(PROMPT, [rollout()]).columns


def test_many_sampled_tokens_do_not_overflow_the_mask() -> None:
    assert rollout(loss_mask=np.ones(1000, dtype=np.uint8), spans=(WeightSpan(3, 1000),)).num_sampled == 1000


def test_every_sampled_token_has_the_version_of_its_span() -> None:
    turns = rollout(
        tokens=np.arange(9, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=np.uint8),
        generation_logprobs=np.zeros(9, dtype=np.float32),
        spans=(WeightSpan(3, 2), WeightSpan(5, 1), WeightSpan(5, 1), WeightSpan(6, 1)),
    )
    assert turns.weight_versions.tolist() == [-1, -1, 3, 3, 5, -1, -1, 5, 6]
    group = RolloutGroup.of(PROMPT, [turns, Rollout.failed(PROMPT, "x")])
    column = group.columns.ragged("weight_versions")
    assert column.values.dtype == np.int32
    assert [row.tolist() for row in column] == [turns.weight_versions.tolist(), [-1, -1, -1]]
    record = json.loads(group.columns.ragged("record")[0].tobytes())
    assert record["weight_spans"] == [
        {"start": 2, "end": 4, "version": 3},
        {"start": 4, "end": 5, "version": 5},
        {"start": 7, "end": 8, "version": 5},
        {"start": 8, "end": 9, "version": 6},
    ]
    assert json.loads(group.columns.ragged("record")[1].tobytes())["weight_spans"] == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)), max_size=6))
def test_recorded_spans_and_the_column_say_the_same(pieces: list[tuple[int, int, int]]) -> None:
    mask = [bit for context, sampled, _ in pieces for bit in [0] * context + [1] * sampled]
    made = rollout(
        tokens=np.zeros(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.uint8),
        generation_logprobs=np.zeros(len(mask), dtype=np.float32),
        spans=tuple(WeightSpan(version, sampled) for _, sampled, version in pieces),
    )
    rebuilt = np.full(len(mask), -1)
    for span in json.loads(rollout_record(PROMPT, 0, made).tobytes())["weight_spans"]:
        rebuilt[span["start"] : span["end"]] = span["version"]
    assert rebuilt.tolist() == made.weight_versions.tolist()


@pytest.mark.parametrize("spans", [(), (WeightSpan(3, 1),), (WeightSpan(3, 2), WeightSpan(4, 1))], ids=len)
def test_spans_that_do_not_cover_the_sampled_tokens_are_refused(spans: tuple[WeightSpan, ...]) -> None:
    with pytest.raises(ValueError, match="marks 2 as sampled"):
        rollout(spans=spans)


def test_a_group_crosses_processes() -> None:
    group = pickle.loads(pickle.dumps(RolloutGroup.of(PROMPT, (rollout(),))))
    assert group.prompt.info == {"answer": "4"}
    assert group.rollouts[0].spans == (WeightSpan(3, 2),)
    assert group.columns.ragged("tokens")[0].tolist() == [5, 6, 7, 8, 9]


def test_reports_by_column_are_those_of_the_single_rollouts() -> None:
    rollouts = [
        rollout(spans=(WeightSpan(3, 1), WeightSpan(4, 1)), info={"seen": 2, "note": "fine"}),
        Rollout.failed(PROMPT, "the environment hung"),
        rollout(status="truncated", stop_reason="length"),
    ]
    reports: RolloutReports = pickle.loads(pickle.dumps(RolloutReports.of("p1", rollouts)))
    assert list(reports) == [RolloutReport.of(each) for each in rollouts]
    assert reports[-1] == reports[1:][1] == RolloutReport.of(rollouts[2])
    assert reports.status == ("ok", "failed", "truncated")


def test_segments_are_rows_and_the_record_is_at_the_first() -> None:
    experts = np.arange(5, dtype=np.int16)[:, None, None]
    split = rollout(segments=(3, 2), routed_experts=experts)
    group = RolloutGroup.of(PROMPT, [rollout(), split, Rollout.failed(PROMPT, "x")])
    for name, whole in (
        ("tokens", split.tokens),
        ("loss_mask", split.loss_mask),
        ("generation_logprobs", split.generation_logprobs),
        ("weight_versions", split.weight_versions),
        ("routed_experts", experts),
    ):
        rows = group.columns.ragged(name)
        assert [len(row) for row in rows] == [5, 3, 2, 3]
        np.testing.assert_array_equal(rows[1], whole[:3])
        np.testing.assert_array_equal(rows[2], whole[3:])
    assert group.rollouts.row_lengths == ((5,), (3, 2), (3,))
    assert [report.segments for report in group.rollouts] == [(), (3, 2), ()]
    records = [json.loads(record.tobytes()) for record in group.records.ragged("record")]
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record.get("segments") for record in records] == [None, [{"num_tokens": 3}, {"num_tokens": 2}], None]


def test_without_segments_records_are_the_rows() -> None:
    group = RolloutGroup.of(PROMPT, [rollout(), rollout()])
    assert group.rollouts.segments == ()
    assert group.records.ragged("record").equals(group.columns.ragged("record"))


def test_the_messages_of_an_agent_are_bounded_and_its_turns_are_whole() -> None:
    long = "x" * MAX_STRING
    tools = tuple({"function": {"name": f"tool {number}", "description": long}} for number in range(20))
    context = SegmentContext(({"role": "user", "content": f"{long}y"},), tools, num_turns=1, call=1)
    said = replace(rollout(), turns=(Turn(f"{long}z", None, {}),), contexts=(context,))
    line = rollout_record(PROMPT, 0, said)
    (segment,) = segments_of(json.loads(line.tobytes()))
    assert len(line) < MAX_CONTEXT + 2 * MAX_STRING
    assert [turn["text"] for turn in segment["turns"]] == [f"{long}z"]
    assert segment["messages"][0]["content"].endswith("x... (65,537 characters)")
    assert [len(tool["function"]["name"]) for tool in segment["tools"]] == [6] * 10 + [7] * 10


def test_records_of_agents_from_earlier_versions_have_their_turns() -> None:
    record = {"segments": [42, 41], "turns": [{"text": "a", "observation": None}, {"text": "b", "observation": None}]}
    assert [turn["text"] for turn in turns_of(record)] == ["a", "b"]
    assert segments_of(record) == []


def test_segments_that_do_not_cover_the_rollout_are_refused() -> None:
    with pytest.raises(ValueError, match="segments of 4 tokens, but 5"):
        rollout(segments=(2, 2))


def test_a_record_holds_what_the_reward_was_given() -> None:
    tests = [f"assert f({number}) == {number}" for number in range(1000)]
    info = {"answer": "12", "seed": np.int64(3), "tests": tests, "long": "x" * (MAX_CHARACTERS + 1)}
    prompt = replace(PROMPT, info=info)
    (record,) = [json.loads(rollout_record(prompt, 0, Rollout.failed(prompt, "it hung")).tobytes())]
    assert record["row"]["answer"] == "12"
    assert record["row"]["seed"] == 3
    assert record["row"]["long"] == "x" * MAX_CHARACTERS + f"... ({MAX_CHARACTERS + 1:,} characters)"
    assert record["row"]["tests"].startswith('["assert f(0) == 0", ')
    assert len(record["row"]["tests"]) < MAX_CHARACTERS + 40


def test_reports_and_records_have_the_agent_and_its_play() -> None:
    rollouts = [
        rollout(agent=agent, peers=peers, play=play)
        for agent, peers, play in [("proposer", "", 0), ("solver", "7+5", 0), ("proposer", "", 1)]
    ]
    group = RolloutGroup.of(PROMPT, rollouts)
    assert group.rollouts.compared == (("proposer", ""), ("solver", "7+5"), ("proposer", ""))
    assert (group.rollouts.plays, group.num_plays) == ((0, 0, 1), 2)
    assert list(group.rollouts) == [RolloutReport.of(each) for each in rollouts]
    records = [json.loads(bytes(record)) for record in group.records.ragged("record")]
    assert [(each["agent"], each["peers"], each["play"]) for each in records] == [
        ("proposer", "", 0),
        ("solver", "7+5", 0),
        ("proposer", "", 1),
    ]


def test_rollouts_without_agents_are_one_set_and_plays_of_their_own() -> None:
    group = RolloutGroup.of(PROMPT, [rollout(), rollout()])
    assert group.rollouts.compared == (("", ""), ("", ""))
    assert (group.rollouts.plays, group.num_plays) == ((0, 1), 2)
    assert "agent" not in json.loads(bytes(group.records.ragged("record")[0]))


def test_the_reports_of_a_group_without_rollouts_can_be_iterated() -> None:
    assert list(RolloutReports.of("p", [])) == []
