"""Turns end their thoughts within a budget, and at the same token however they are requested."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rollouts.generation import GenerationRequest, SamplingParams, ThinkingBudget
from rl_core.rollouts.rollout import Completion, Thinking, WeightSpan
from rl_core.rollouts.thinking import generate_turn

BEGIN, END, STOP = 100, 101, 102
FORCED = [50, END, 51]
PROMPT = np.array([1, 2, 3], np.int32)


class ThinkingEngine:
    """Thinks for `length` tokens between `BEGIN` and `END` and answers with three tokens, each of which follows from
    the tokens before it; `cuts` end its answers as interruptions do, each with the next weight version after it.
    """

    def __init__(self, length, cuts=()):
        self.length, self.cuts, self.version = length, list(cuts), 1
        self.requests = []

    async def generate(self, request):
        assert request.sampling.thinking is None
        self.requests.append(request)
        row, count = request.token_ids.tolist(), len(request.token_ids)
        cut = self.cuts.pop(0) if self.cuts else None
        version, reason = self.version, "length"
        self.version += cut is not None
        while len(row) - count < request.sampling.max_new_tokens:
            if len(row) - count == cut:
                reason = "abort"
                break
            row.append(self._next(row[len(PROMPT) :]))
            if row[-1] == STOP:
                reason = "stop"
                break
        new = np.array(row[count:], np.int32)
        spans = (WeightSpan(version, len(new)),) if len(new) else ()
        return Completion(new, -new.astype(np.float32), reason, spans)

    def _next(self, said):
        if self.length is not None and BEGIN not in said:
            return BEGIN
        if self.length is not None and END not in said:
            return END if len(said) > self.length else 10 + len(said) % 7
        answered = len(said) - 1 - said.index(END) if END in said else len(said)
        return STOP if answered > 12 else 20 + sum(said) % 9


class Marks:
    def thoughts(self, prompt, completion):
        said = completion.tolist()
        if BEGIN not in said or END in said:
            return (said.index(END) + 1 if END in said else 0), ""
        return len(said), "<think>"

    def encoded(self, text):
        assert text == "\n</think>\n\n"
        return np.array(FORCED, np.int32)


def turn(engine, *, limit=40, closes=True, budget=8):
    sampling = SamplingParams(limit, thinking=ThinkingBudget(budget, closes=closes))
    return asyncio.run(generate_turn(engine.generate, GenerationRequest(PROMPT, sampling, 0), Marks()))


def test_open_thoughts_are_closed_and_the_answer_continues_after_them():
    engine = ThinkingEngine(30)
    found = turn(engine)
    assert found.token_ids[:11].tolist() == [BEGIN, 11, 12, 13, 14, 15, 16, 10, *FORCED]
    assert found.sampled_mask.tolist() == [1] * 8 + [0] * 3 + [1] * (len(found.token_ids) - 11)
    assert found.logprobs[8:11].tolist() == [0, 0, 0]
    assert found.logprobs[11:].tolist() == (-found.token_ids[11:]).tolist()
    assert (found.stop_reason, found.thinking) == ("stop", Thinking(8, 3, is_cut=True))
    assert found.spans == (WeightSpan(1, len(found.token_ids) - 3),)
    first, rest = engine.requests
    assert (first.sampling.max_new_tokens, rest.sampling.max_new_tokens) == (8, 40 - 11)
    # The engine draws later tokens with other random numbers, and looks for stop strings from the start of the turn.
    assert (rest.num_sampled, rest.token_ids.tolist()) == (11, [*PROMPT, *found.token_ids[:11]])


def test_a_turn_that_is_truncated_ends_at_its_budget():
    engine = ThinkingEngine(30)
    found = turn(engine, closes=False)
    assert len(engine.requests) == 1
    assert (len(found.token_ids), found.stop_reason) == (8, "length")
    assert (found.thinking, found.sampled_mask.all()) == (Thinking(8, is_cut=True), True)


@pytest.mark.parametrize(("length", "num_tokens", "num_requests"), [(3, 5, 2), (7, 9, 2), (None, 0, 2)])
def test_thoughts_that_end_in_time_stay_as_they_are(length, num_tokens, num_requests):
    engine = ThinkingEngine(length)
    found = turn(engine, budget=num_tokens or 8)
    whole = turn(ThinkingEngine(length), budget=39)
    assert found.token_ids.tolist() == whole.token_ids.tolist()
    assert (found.thinking, len(engine.requests)) == (Thinking(num_tokens), num_requests)
    assert found.sampled_mask.all()


@pytest.mark.parametrize(
    ("limit", "num_tokens", "is_cut"), [(8, 8, False), (5, 5, False), (11, 8, True), (12, 12, True)]
)
def test_forced_tokens_count_towards_the_limit_of_the_turn(limit, num_tokens, is_cut):
    found = turn(ThinkingEngine(30), limit=limit)
    assert (len(found.token_ids), found.stop_reason) == (num_tokens, "length")
    assert found.thinking.is_cut == is_cut


@given(
    cuts=st.lists(st.integers(0, 9), max_size=8),
    length=st.sampled_from([None, 3, 6, 7, 8, 30]),
    closes=st.booleans(),
    limit=st.integers(1, 40),
)
def test_interruptions_move_no_end_of_thoughts(cuts, length, closes, limit):
    expected = turn(ThinkingEngine(length), closes=closes, limit=limit)
    engine = ThinkingEngine(length, cuts)
    found = turn(engine, closes=closes, limit=limit)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.thinking, found.stop_reason) == (expected.thinking, expected.stop_reason)
    assert found.logprobs.tolist() == expected.logprobs.tolist()
    assert sum(span.num_tokens for span in found.spans) == found.sampled_mask.sum()
    versions = [span.version for span in found.spans]
    assert versions == sorted(set(versions))
    assert all(request.sampling.max_new_tokens > 0 for request in engine.requests)


def test_experts_of_forced_tokens_are_those_of_the_pass_that_read_them():
    engine = ThinkingEngine(30)

    async def routed(request):
        found = await engine.generate(request)
        computed = len(request.token_ids) + len(found.token_ids) - 1
        return replace(found, routed_experts=np.full((computed, 1, 1), len(engine.requests), np.int16))

    request = GenerationRequest(PROMPT, SamplingParams(40, thinking=ThinkingBudget(8)), 0)
    found = asyncio.run(generate_turn(routed, request, Marks()))
    # The first pass does not feed back its last token; the second one computes it, and the forced tokens.
    assert found.routed_experts[:, 0, 0].tolist() == [1] * 10 + [2] * (len(found.token_ids) + 3 - 1 - 10)
