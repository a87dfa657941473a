"""An interrupted completion is the one that an uninterrupted request gives."""

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.rollout import Completion, WeightSpan

CONTEXT = 40
VOCABULARY = "abcdefgh"


@dataclass
class ScriptedEngine:
    """A greedy engine whose every token follows from all before it; it ends a part after each of `cuts`, as an
    interruption would, and then serves the next of `versions` (the last one for good).
    """

    cuts: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=lambda: [1])
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        sampling = request.sampling
        limit = min(sampling.max_new_tokens, CONTEXT - len(request.token_ids))
        assert limit > 0
        row = request.token_ids.tolist()
        start = len(row)
        first_sampled = start - request.num_sampled
        reason = "length"
        while len(row) - start < limit:
            if len(row) - start == cut:
                reason = "abort"
                break
            row.append(_next(row))
            text = "".join(VOCABULARY[token] for token in row[first_sampled:])
            if row[-1] in sampling.stop_token_ids or any(text.endswith(stop) for stop in sampling.stop_strings):
                reason = "stop"
                break
        sampled = row[start:]
        return Completion(
            np.array(sampled, np.int32),
            np.array([-token for token in sampled], np.float32),
            reason,
            (WeightSpan(version, len(sampled)),) if sampled else (),
            _routing(len(row) - 1, version) if sampled else None,
        )


def _next(row):
    return (sum((index + 1) * token for index, token in enumerate(row)) * 7 + len(row)) % len(VOCABULARY)


def _routing(num_computed, version):
    return np.full((num_computed, 1, 1), version, np.int16)


def whole(engine, request):
    return asyncio.run(generate_whole(engine.generate, request))


PROMPTS = st.lists(st.integers(0, 7), min_size=1, max_size=6)
SAMPLINGS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 60),
    temperature=st.just(0.0),
    stop_token_ids=st.sampled_from([(), (3,), (0, 5)]),
    stop_strings=st.sampled_from([(), ("ab",), ("cab", "hh", "dgh"), ("abc" * 3,)]),
)
CUTS = st.lists(st.integers(0, 9), max_size=12)


@given(PROMPTS, SAMPLINGS, CUTS)
def test_interruptions_without_other_weights_change_nothing(prompt, sampling, cuts):
    request = GenerationRequest(np.array(prompt, np.int32), sampling, seed=5)
    expected = asyncio.run(ScriptedEngine().generate(request))
    found = whole(ScriptedEngine(cuts=cuts), request)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.tolist() == expected.logprobs.tolist()
    assert (found.token_ids.dtype, found.logprobs.dtype) == (np.int32, np.float32)
    assert (found.stop_reason, found.spans) == (expected.stop_reason, expected.spans)
    assert found.routed_experts.tolist() == expected.routed_experts.tolist()


@given(PROMPTS, SAMPLINGS, CUTS, st.lists(st.integers(0, 2), min_size=1, max_size=13))
def test_every_token_is_in_the_span_of_the_version_that_sampled_it(prompt, sampling, cuts, steps):
    versions = np.cumsum(steps).tolist()
    engine = ScriptedEngine(cuts=list(cuts), versions=list(versions))
    found = whole(engine, GenerationRequest(np.array(prompt, np.int32), sampling, seed=5))
    lengths = [len(later.token_ids) - len(one.token_ids) for one, later in pairwise(engine.requests)]
    lengths.append(len(prompt) + len(found.token_ids) - len(engine.requests[-1].token_ids))
    served = [*versions, *[versions[-1]] * len(lengths)][: len(lengths)]
    expected = np.repeat(served, lengths).tolist()
    assert [span.version for span in found.spans for _ in range(span.num_tokens)] == expected
    assert all(one.version != other.version for one, other in pairwise(found.spans))
    # the experts of the pass that sampled the token after it
    assert found.routed_experts[:, 0, 0].tolist() == [expected[0]] * (len(prompt) - 1) + expected


def test_each_request_for_the_rest_names_the_tokens_that_were_sampled_and_asks_for_no_more_than_is_left():
    engine = ScriptedEngine(cuts=[3, 0, 4])
    request = GenerationRequest(np.array([1, 2], np.int32), SamplingParams(20), seed=9, num_sampled=1)
    whole(engine, request)
    assert [(each.num_sampled, len(each.token_ids)) for each in engine.requests] == [(1, 2), (4, 5), (4, 5), (8, 9)]
    assert [each.sampling.max_new_tokens for each in engine.requests] == [20, 17, 17, 13]
    assert {each.seed for each in engine.requests} == {9}
    assert engine.requests[0] is request


def scripted(max_new_tokens, *parts):
    remaining = list(parts)

    async def generate(request):
        return remaining.pop(0)

    request = GenerationRequest(np.array([1], np.int32), SamplingParams(max_new_tokens), seed=0)
    found = asyncio.run(generate_whole(generate, request))
    assert not remaining
    return found


CUT = Completion(np.array([4, 5], np.int32), np.zeros(2, np.float32), "abort", (WeightSpan(1, 2),))


def test_a_completion_that_was_cut_off_at_its_limit_is_whole():
    assert scripted(2, CUT).stop_reason == "length"
    assert scripted(4, CUT, CUT).stop_reason == "length"


def test_a_completion_that_was_not_interrupted_is_returned_as_it_is():
    whole = replace(CUT, stop_reason="stop")
    assert scripted(9, whole) is whole


def test_a_completion_has_the_spans_of_all_its_parts():
    found = scripted(9, CUT, replace(CUT, spans=(WeightSpan(2, 2),), stop_reason="stop"))
    assert found.spans == (WeightSpan(1, 2), WeightSpan(2, 2))
    assert found.stop_reason == "stop"
