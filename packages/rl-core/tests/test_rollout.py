from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np

from rl_core.rollout import Prompt, Rollout, RolloutGroup, RolloutReport, RolloutReports, WeightSpan

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
    assert rollout(loss_mask=np.ones(1000, dtype=np.uint8)).num_sampled == 1000


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
