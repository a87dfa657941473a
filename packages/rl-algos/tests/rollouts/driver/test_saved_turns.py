"""Turns of rollouts under way in a checkpoint."""

import dataclasses

import numpy as np
import pytest

from rl_algos.rollouts.driver.saved import turns_from, turns_state
from rl_core.rollouts.environment import KeptState, StepResult
from rl_core.rollouts.pool import AnsweredTurns, RolloutTurns
from rl_core.rollouts.rollout import Completion, Thinking, WeightSpan


def completion(tokens, *, version=1, routed=None, thinking=None):
    logprobs = -np.array(tokens, np.float32)
    spans = (WeightSpan(version, 1), WeightSpan(version + 1, len(tokens) - 1)) if tokens else ()
    return Completion(np.array(tokens, np.int32), logprobs, "stop", spans, routed, thinking)


@pytest.mark.parametrize(
    "turns",
    [
        ({"a": completion([1, 2, 3]), "b": completion([4, 5])}, {}, {"c": completion([6, 7], version=3)}),
        ({"a": completion([])}, {"b": completion([1, 2], routed=np.arange(6, dtype=np.int16).reshape(3, 2, 1))}),
        ({}, {}),
        ({"a": completion([1, 2, 3], thinking=Thinking(1, 1, is_cut=True)), "b": completion([4])},),
    ],
    ids=["several", "routed", "none", "thoughts"],
)
def test_completions_come_back_as_they_were(turns):
    found = turns_from(turns_state([RolloutTurns(each) for each in turns]))
    assert [list(each.completions) for each in found] == [list(each) for each in turns]
    for ours, theirs in zip(found, turns, strict=True):
        for digest, expected in theirs.items():
            got = ours.completions[digest]
            assert (got.token_ids.dtype, got.logprobs.dtype) == (np.int32, np.float32)
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_array_equal(got.logprobs, expected.logprobs)
            assert (got.stop_reason, got.spans) == (expected.stop_reason, expected.spans)
            np.testing.assert_array_equal(got.routed_experts, expected.routed_experts)
            assert got.thinking == expected.thinking


def test_answers_come_back_as_they_were():
    said = ({"role": "user", "content": "higher"},)
    goes_on = StepResult({"reward": 0.5, "form": 1.0}, done=False, observation=said, stop_strings=("</a>",))
    held = dataclasses.replace(goes_on, state=KeptState())
    saved = dataclasses.replace(goes_on, state=KeptState(b"\x00state"), info={"seen": (1, "two")})
    turns = [
        RolloutTurns({}, (AnsweredTurns(("a", "b"), (held, saved)), AnsweredTurns(("c",), (StepResult(1.0),)))),
        RolloutTurns({}),
        RolloutTurns({"d": completion([1])}, (AnsweredTurns(("e",), (goes_on,)),)),
    ]
    assert [each.conversations for each in turns_from(turns_state(turns))] == [each.conversations for each in turns]


def test_turns_of_a_checkpoint_without_answers_and_thoughts_have_none():
    state = dict(turns_state([RolloutTurns({"a": completion([1])})]))
    del state["results"], state["conversations"], state["thinking"]
    assert [each.conversations for each in turns_from(state)] == [()]
    assert turns_from(state)[0].completions["a"].thinking is None
