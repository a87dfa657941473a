"""Conformance suite of generators, for any engine."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rl_core.errors import RequestRefused
from rl_core.rollouts.generation import GenerationRequest, SamplingParams, ThinkingBudget
from rl_core.rollouts.grammar import TokenGrammars
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.rollout import Completion, Thinking
from rl_core.rollouts.thinking import ThoughtReader, generate_turn
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE, processed_logprobs
from rl_core.testing.weights import CONTEXT, Bench, WeightSinkSuite, prompt
from rl_core.token_filter import allowed_row, allowed_sets
from rl_core.tracing.profiling import ProfileOrder, ProfileReport

FILTERS = [
    SamplingParams(12),
    SamplingParams(12, temperature=0.6),
    SamplingParams(12, temperature=1.4, top_k=5),
    SamplingParams(12, top_p=0.7),
    SamplingParams(12, temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(12, temperature=0.9, min_p=0.2),
    SamplingParams(12, top_p=0.95, min_p=0.02),
    SamplingParams(12, temperature=0),
]


def _structural_tag(content: Mapping[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": content})


def _regex(pattern: str) -> str:
    return _structural_tag({"type": "regex", "pattern": pattern})


GREEDY_JSON = SamplingParams(
    40,
    temperature=0,
    grammar=_structural_tag(
        {
            "type": "json_schema",
            "max_whitespace_cnt": 1,
            "json_schema": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["one", "other"]},
                    "sum": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["kind", "sum"],
                "additionalProperties": False,
            },
        }
    ),
)
"""A completion that must match a JSON schema."""


def are_allowed(sets: Sequence[bytes]) -> np.ndarray:
    """Return bool `[tokens, vocab]` of the sets of allowed tokens."""
    numbers, bits = allowed_sets([allowed_row(sets)], [len(sets)])
    return np.unpackbits(bits, axis=1, bitorder="little")[:, :VOCAB_SIZE].astype(bool)[numbers]


def _generate(bench: Bench, requests: Sequence[GenerationRequest]) -> list[Completion]:
    async def together() -> list[Completion]:
        calls = [bench.generator.generate(request) for request in requests]
        return await asyncio.gather(*calls)

    return bench.runner.run(together())


def _turns(bench: Bench, requests: Sequence[GenerationRequest], reader: ThoughtReader) -> list[Completion]:
    async def together() -> list[Completion]:
        calls = [generate_turn(bench.generator.generate, request, reader) for request in requests]
        return await asyncio.gather(*calls)

    return bench.runner.run(together())


def _one(bench: Bench, token_ids: np.ndarray, sampling: SamplingParams, seed: int = 0) -> Completion:
    return _generate(bench, [GenerationRequest(token_ids, sampling, seed)])[0]


class OpenThoughts:
    """A reader of turns that think without an end, or not at all."""

    END = np.array([5, 9, 4], np.int32)

    def __init__(self, *, exist: bool = True) -> None:
        self._exist = exist

    def thoughts(self, prompt: np.ndarray, completion: np.ndarray) -> tuple[int, str]:
        return (len(completion), "<think>") if self._exist else (0, "")

    def encoded(self, text: str) -> np.ndarray:
        return self.END


MAX_ROUNDS = 50
"""In each of them requests may be over before they can be interrupted."""


class GeneratorSuite(WeightSinkSuite):
    """Conformance of a `Generator`: results equal results of `transformers`, however requests are batched.

    ::

        class TestMyGenerator(GeneratorSuite):
            tolerance = 1e-4

            @classmethod
            def make_generator(cls, model_dir):
                return MyGenerator(GenerationConfig(), MyConfig(), model_config(model_dir), Placement("cpu"))

            @classmethod
            async def make_head_stale(cls, generator): ...
    """

    draws_by_place: ClassVar[bool] = False
    """True if the random number of a token follows only from the seed and the token's place in its completion."""

    def test_greedy_takes_the_most_likely_token(self, bench: Bench) -> None:
        prompts = [prompt(length) for length in (1, 7, 30)]
        greedy = SamplingParams(12, temperature=0)
        found = _generate(bench, [GenerationRequest(tokens, greedy, 0) for tokens in prompts])
        for tokens, completion in zip(prompts, found, strict=True):
            assert completion.token_ids.tolist() == bench.reference.greedy(tokens, 12)

    @pytest.mark.parametrize("sampling", FILTERS, ids=str)
    def test_logprobs_are_those_the_token_was_drawn_with(self, bench: Bench, sampling: SamplingParams) -> None:
        requests = [GenerationRequest(prompt(3 + 9 * seed), sampling, seed) for seed in range(5)]
        for request, completion in zip(requests, _generate(bench, requests), strict=True):
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            found = completion.logprobs
            expected = bench.reference.nearest_logprobs(found, request.token_ids, completion.token_ids, sampling)
            np.testing.assert_allclose(found, expected, atol=self.tolerance)

    @pytest.mark.parametrize("sampling", [SamplingParams(1), SamplingParams(1, temperature=0.9, top_k=4)], ids=str)
    def test_tokens_are_drawn_as_often_as_they_are_likely(self, bench: Bench, sampling: SamplingParams) -> None:
        count = 400
        tokens = prompt(9)
        found = _generate(bench, [GenerationRequest(tokens, sampling, seed) for seed in range(count)])
        drawn = np.bincount([int(completion.token_ids[0]) for completion in found], minlength=VOCAB_SIZE)
        likely = np.exp(processed_logprobs(bench.reference.logits(tokens)[-1], sampling))
        deviation = np.sqrt(count * likely * (1 - likely))
        # five standard deviations, and two draws for tokens that are hardly ever drawn
        assert (np.abs(drawn - count * likely) <= 5 * deviation + 2 * (likely > 0)).all()

    @pytest.mark.parametrize("sampling", [GREEDY_JSON, replace(GREEDY_JSON, temperature=0.8, top_p=0.9)], ids=str)
    def test_a_grammar_limits_the_tokens_and_logprobs_are_normalised_over_the_allowed_ones(
        self, bench: Bench, sampling: SamplingParams
    ) -> None:
        sampling = replace(sampling, stop_token_ids=(EOS_TOKEN_ID,))
        requests = [GenerationRequest(prompt(3 + 9 * seed), sampling, seed) for seed in range(6)]
        # Requests without a grammar share the engine's batches.
        requests += [GenerationRequest(prompt(5), SamplingParams(20), seed) for seed in range(2)]
        grammars = TokenGrammars(bench.reference.tokenizer)
        found = _generate(bench, requests)
        for request, completion in zip(requests, found, strict=True):
            tokens, is_allowed = completion.token_ids, None
            if request.sampling.grammar:
                sets = grammars.sets(sampling.grammar, sampling.stop_token_ids, tokens)
                is_allowed = are_allowed(sets)
                assert is_allowed.sum(1).min() == 1, "somewhere the grammar leaves no choice"
                assert completion.logprobs[is_allowed.sum(1) == 1] == pytest.approx(0, abs=self.tolerance)
                assert set(json.loads(bench.reference.decode(tokens[:-1].tolist()))) == {"kind", "sum"}
            expected = bench.reference.nearest_logprobs(
                completion.logprobs, request.token_ids, tokens, request.sampling, is_allowed
            )
            np.testing.assert_allclose(completion.logprobs, expected, atol=self.tolerance)
        assert all(completion.stop_reason == "stop" for completion in found[:6])

    def test_allowed_tokens_are_drawn_as_often_as_they_are_likely_among_each_other(self, bench: Bench) -> None:
        count, tokens = 300, prompt(9)
        sampling = replace(GREEDY_JSON, temperature=0.9, max_new_tokens=1, grammar=_regex("[0-9x]{3}"))
        found = _generate(bench, [GenerationRequest(tokens, sampling, seed) for seed in range(count)])
        drawn = np.bincount([int(completion.token_ids[0]) for completion in found], minlength=VOCAB_SIZE)
        grammars = TokenGrammars(bench.reference.tokenizer)
        (is_allowed,) = are_allowed(grammars.sets(sampling.grammar, (), found[0].token_ids))
        logits = np.where(is_allowed, bench.reference.logits(tokens)[-1], -np.inf)
        likely = np.exp(processed_logprobs(logits, sampling))
        can_be = count * likely > 5
        statistic = ((drawn - count * likely)[can_be] ** 2 / (count * likely)[can_be]).sum()
        assert drawn[~is_allowed].sum() == 0
        # Mean and variance of chi-square are k and 2 k; five standard deviations.
        assert statistic < can_be.sum() + 5 * np.sqrt(2 * can_be.sum())

    def test_a_grammar_continues_after_an_interruption(self, bench: Bench) -> None:
        sampling = replace(GREEDY_JSON, stop_token_ids=(EOS_TOKEN_ID,))
        request = GenerationRequest(prompt(5), sampling, 0)
        whole = _one(bench, request.token_ids, sampling)

        async def interrupted() -> Completion:
            task = asyncio.create_task(generate_whole(bench.generator.generate, request))
            while not task.done():
                await asyncio.sleep(0.02)
                await bench.generator.pause("interrupt")
                await bench.generator.resume()
            return task.result()

        found = bench.runner.run(interrupted())
        assert found.token_ids.tolist() == whole.token_ids.tolist()
        np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=self.tolerance)

    def test_an_invalid_grammar_is_refused(self, bench: Bench) -> None:
        with pytest.raises(RequestRefused):
            _one(bench, prompt(5), replace(GREEDY_JSON, grammar='{"type": "structural_tag"}'))
        assert len(_one(bench, prompt(5), SamplingParams(3)).token_ids) == 3

    def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(self, bench: Bench) -> None:
        requests = [
            GenerationRequest(prompt(2 + 5 * (seed % 7), seed), FILTERS[seed % len(FILTERS)], seed)
            for seed in range(24)
        ]
        together = _generate(bench, requests)
        for index in (0, 7, 22):
            alone = _generate(bench, [requests[index]])[0]
            assert alone.token_ids.tolist() == together[index].token_ids.tolist()
        again = _generate(bench, list(reversed(requests)))[::-1]
        assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in together]

    def test_other_seeds_give_other_tokens(self, bench: Bench) -> None:
        found = _generate(bench, [GenerationRequest(prompt(5), SamplingParams(16), seed) for seed in range(6)])
        assert len({tuple(completion.token_ids.tolist()) for completion in found}) == 6

    def test_a_stop_token_ends_a_completion_and_belongs_to_it(self, bench: Bench) -> None:
        free = _one(bench, prompt(6), SamplingParams(24), seed=3).token_ids.tolist()
        stop = free[9]
        completion = _one(bench, prompt(6), SamplingParams(24, stop_token_ids=(stop, 1)), seed=3)
        end = min(free.index(token) for token in (stop, 1) if token in free) + 1
        assert completion.token_ids.tolist() == free[:end]
        assert completion.stop_reason == "stop"

    def test_the_end_of_sequence_ends_only_completions_that_list_it(self, bench: Bench) -> None:
        hot = SamplingParams(48, temperature=8.0)
        found = _generate(bench, [GenerationRequest(prompt(4), hot, seed) for seed in range(48)])
        assert any(EOS_TOKEN_ID in completion.token_ids for completion in found)
        assert {(len(completion.token_ids), completion.stop_reason) for completion in found} == {(48, "length")}

    def test_a_stop_string_ends_a_completion_and_belongs_to_it(self, bench: Bench) -> None:
        tokens, free, start = self._greedy_with_text(bench)
        stop = bench.reference.decode(free[start : start + 3])
        greedy = SamplingParams(16, temperature=0, stop_strings=("never, never", stop))
        completion = _one(bench, tokens, greedy)
        texts = [bench.reference.decode(free[:count]) for count in range(1, 17)]
        end = next(count for count, text in enumerate(texts, start=1) if stop in text)
        assert completion.token_ids.tolist() == free[:end]
        assert completion.stop_reason == "stop"

    def test_token_and_context_limits_end_a_completion(self, bench: Bench) -> None:
        completion = _one(bench, prompt(10), SamplingParams(5))
        assert (len(completion.token_ids), completion.stop_reason) == (5, "length")
        completion = _one(bench, prompt(CONTEXT - 3), SamplingParams(50))
        assert (len(completion.token_ids), completion.stop_reason) == (3, "length")
        expected = bench.reference.completion_logprobs(prompt(CONTEXT - 3), completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=self.tolerance)

    def test_requests_that_cannot_be_served_are_refused(self, bench: Bench) -> None:
        for tokens in (prompt(CONTEXT), np.zeros(0, np.int32), np.array([3, VOCAB_SIZE], np.int32)):
            with pytest.raises(RequestRefused):
                _one(bench, tokens, SamplingParams(4))
        assert len(_one(bench, prompt(4), SamplingParams(4)).token_ids) == 4

    @pytest.mark.parametrize("length", [1, 2, 70, CONTEXT])
    def test_score_gives_logprobs_of_given_tokens(self, bench: Bench, length: int) -> None:
        tokens = prompt(length)
        scores = bench.runner.run(bench.generator.score(tokens))
        assert scores.dtype == np.float32
        assert scores[0] == 0
        np.testing.assert_allclose(scores, bench.reference.score(tokens), atol=self.tolerance)

    def test_health_tells_an_engine_that_works_from_one_that_is_idle(self, bench: Bench) -> None:
        before = bench.runner.run(bench.generator.health())
        _one(bench, prompt(4), SamplingParams(8))
        after = bench.runner.run(bench.generator.health())
        assert (before["num_requests"], after["num_requests"]) == (0, 0)
        assert after["num_sampled"] > before["num_sampled"]

    def test_a_profile_has_what_the_engine_computes(self, bench: Bench, tmp_path: Path) -> None:
        order = ProfileOrder(str(tmp_path), "rollout-worker-0", ("torch",))
        assert bench.runner.run(bench.generator.start_profile(order)) == ProfileReport()
        _one(bench, prompt(4), SamplingParams(4))
        ended = bench.runner.run(bench.generator.stop_profile())
        (file,) = ended.files
        assert Path(file) == tmp_path / "rollout-worker-0.torch.json.gz"
        names = {event.get("name") for event in json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]}
        assert any(str(name).startswith("aten::") for name in names)
        assert bench.runner.run(bench.generator.stop_profile()) == ProfileReport()

    def test_sleep_and_wake_change_nothing(self, bench: Bench) -> None:
        async def nap() -> None:
            await bench.generator.pause()
            await bench.generator.sleep()
            await bench.generator.wake(("weights",))
            await bench.generator.wake(("kv_cache",))
            await bench.generator.resume()

        before = _one(bench, prompt(150), SamplingParams(8), seed=5)
        bench.runner.run(nap())
        after = _one(bench, prompt(150), SamplingParams(8), seed=5)
        assert after.token_ids.tolist() == before.token_ids.tolist()
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=self.tolerance)

    def test_a_pause_ends_what_is_in_flight_and_holds_back_the_rest(self, bench: Bench) -> None:
        async def pausing() -> None:
            request = GenerationRequest(prompt(5), SamplingParams(60), 0)
            early = asyncio.create_task(bench.generator.generate(request))
            await asyncio.sleep(0.01)
            await bench.generator.pause()
            assert early.done()
            late = asyncio.create_task(bench.generator.generate(request))
            await asyncio.sleep(0.3)
            assert not late.done()
            await bench.generator.score(prompt(5))
            await bench.generator.resume()
            assert (await late).token_ids.tolist() == early.result().token_ids.tolist()

        bench.runner.run(pausing())

    def test_a_request_that_a_resume_lets_go_waits_for_a_pause_that_follows_at_once(self, bench: Bench) -> None:
        async def pausing_twice() -> None:
            await bench.generator.pause()
            late = asyncio.create_task(bench.generator.generate(GenerationRequest(prompt(5), SamplingParams(2), 0)))
            await asyncio.sleep(0.01)
            await bench.generator.resume()
            await bench.generator.pause()
            for _ in range(10):
                await asyncio.sleep(0)
            assert (await bench.generator.health())["num_requests"] == 0
            assert not late.done()
            await bench.generator.resume()
            assert len((await late).token_ids) == 2

        bench.runner.run(pausing_twice())

    def test_health_counts_tokens_while_requests_are_decoded(self, bench: Bench) -> None:
        async def num_sampled() -> int:
            numbers = await asyncio.wait_for(bench.generator.health(), 30)
            assert all(np.isfinite(value) for value in numbers.values())
            return int(numbers["num_sampled"])

        async def asking() -> None:
            requests = [GenerationRequest(prompt(5), SamplingParams(200), seed) for seed in range(8)]
            # The last step of earlier requests is over then, and its tokens are counted.
            await bench.generator.score(prompt(5))
            before = await num_sampled()
            tasks = [asyncio.create_task(bench.generator.generate(request)) for request in requests]
            seen = set()
            while not all(task.done() for task in tasks):
                seen.add(await num_sampled() - before)
                await asyncio.sleep(0.002)
            # Counts of the last step follow its completions.
            while (counted := await num_sampled() - before) < 8 * 200:
                await asyncio.sleep(0.002)
            assert counted == 8 * 200
            assert seen - {0, 8 * 200}

        bench.runner.run(asking())

    def test_a_cancelled_request_disturbs_no_other(self, bench: Bench) -> None:
        async def cancelling() -> Completion:
            requests = [GenerationRequest(prompt(6), SamplingParams(40), seed) for seed in range(4)]
            tasks = [asyncio.create_task(bench.generator.generate(request)) for request in requests]
            await asyncio.sleep(0.02)
            tasks[1].cancel()
            kept = await tasks[2]
            await bench.generator.pause()
            await bench.generator.resume()
            return kept

        kept = bench.runner.run(cancelling())
        assert kept.token_ids.tolist() == _one(bench, prompt(6), SamplingParams(40), seed=2).token_ids.tolist()

    def test_a_pause_that_interrupts_ends_requests_with_the_tokens_they_have(self, bench: Bench) -> None:
        request = GenerationRequest(prompt(5), SamplingParams(200), 3)
        whole = _one(bench, request.token_ids, request.sampling, request.seed)

        async def interrupting() -> Completion:
            part = await _interrupted(bench, request)
            late = asyncio.create_task(bench.generator.generate(request))
            await bench.generator.score(prompt(5))
            await asyncio.sleep(0.05)
            assert not late.done()
            await bench.generator.resume()
            assert (await late).token_ids.tolist() == whole.token_ids.tolist()
            return part

        part = bench.runner.run(interrupting())
        count = len(part.token_ids)
        assert 0 < count < 200
        assert part.token_ids.tolist() == whole.token_ids[:count].tolist()
        np.testing.assert_allclose(part.logprobs, whole.logprobs[:count], atol=self.tolerance)
        assert [span.num_tokens for span in part.spans] == [count]

    def test_a_pause_interrupts_requests_that_the_engine_has_not_begun(self, bench: Bench) -> None:
        async def interrupting() -> list[Completion]:
            requests = [GenerationRequest(prompt(5), SamplingParams(200), seed) for seed in range(4)]
            tasks = [asyncio.create_task(bench.generator.generate(request)) for request in requests]
            await asyncio.sleep(0)
            await bench.generator.pause("interrupt")
            await bench.generator.resume()
            return await asyncio.gather(*tasks)

        for part in bench.runner.run(interrupting()):
            assert len(part.logprobs) == len(part.token_ids) == sum(span.num_tokens for span in part.spans)
            assert part.stop_reason == ("abort" if len(part.token_ids) < 200 else "length")

    def test_interruptions_change_no_greedy_completion(self, bench: Bench) -> None:
        greedy = SamplingParams(60, temperature=0)
        prompts = [prompt(length) for length in (1, 7, 30)]
        requests = [GenerationRequest(tokens, greedy, 0) for tokens in prompts]

        async def interrupted() -> tuple[list[Completion], int]:
            parts: list[Completion] = []

            async def generate(request: GenerationRequest) -> Completion:
                parts.append(await bench.generator.generate(request))
                return parts[-1]

            tasks = [asyncio.create_task(generate_whole(generate, request)) for request in requests]
            # With a constant period, the engine of a busy machine would never get to sample a token.
            period = 0.01
            while not all(task.done() for task in tasks):
                await asyncio.sleep(period)
                period *= 1.25
                await bench.generator.pause("interrupt")
                await bench.generator.resume()
            return [task.result() for task in tasks], sum(part.stop_reason == "abort" for part in parts)

        for _ in range(MAX_ROUNDS):
            found, num_interruptions = bench.runner.run(interrupted())
            for tokens, completion in zip(prompts, found, strict=True):
                assert completion.token_ids.tolist() == bench.reference.greedy(tokens, 60)
                expected = bench.reference.completion_logprobs(tokens, completion.token_ids)
                np.testing.assert_allclose(completion.logprobs, expected, atol=self.tolerance)
                assert (completion.stop_reason, len(completion.spans)) == ("length", 1)
            if num_interruptions:
                return
        raise AssertionError("every request was over before it could be interrupted")

    @pytest.mark.parametrize("sampling", FILTERS[4::3], ids=str)
    def test_thoughts_end_at_their_budget_and_sampled_tokens_keep_their_logprobs(
        self, bench: Bench, sampling: SamplingParams
    ) -> None:
        budget, limit, end = 9, 24, OpenThoughts.END
        limited = replace(sampling, max_new_tokens=limit, thinking=ThinkingBudget(budget))
        free = replace(sampling, max_new_tokens=limit)
        # Several completions of one prompt share the engine's cache of it.
        requests = [GenerationRequest(prompt(20 + 40 * (seed // 3)), limited, seed) for seed in range(6)]
        found = _turns(bench, requests, OpenThoughts())
        plain = _generate(bench, [replace(request, sampling=free) for request in requests])
        for request, whole, completion in zip(requests, plain, found, strict=True):
            tokens, mask = completion.token_ids, completion.sampled_mask
            assert completion.thinking == Thinking(budget, len(end), is_cut=True)
            assert np.flatnonzero(mask == 0).tolist() == [budget, budget + 1, budget + 2]
            assert tokens[:budget].tolist() == whole.token_ids[:budget].tolist()
            assert tokens[budget : budget + len(end)].tolist() == end.tolist()
            assert (len(tokens), completion.stop_reason) == (limit, "length")
            assert sum(span.num_tokens for span in completion.spans) == mask.sum() == limit - len(end)
            expected = bench.reference.nearest_logprobs(completion.logprobs, request.token_ids, tokens, sampling)
            np.testing.assert_allclose(completion.logprobs, np.where(mask, expected, 0), atol=self.tolerance)

    def test_turns_that_think_less_than_their_budget_are_as_without_it(self, bench: Bench) -> None:
        free = SamplingParams(24, temperature=1.0 if self.draws_by_place else 0.0)
        requests = [GenerationRequest(prompt(8 + seed), free, seed) for seed in range(4)]
        limited = [replace(each, sampling=replace(free, thinking=ThinkingBudget(9))) for each in requests]
        for whole, found in zip(
            _generate(bench, requests), _turns(bench, limited, OpenThoughts(exist=False)), strict=True
        ):
            assert found.token_ids.tolist() == whole.token_ids.tolist()
            assert (found.thinking, found.stop_reason, found.spans) == (Thinking(0), "length", whole.spans)
            np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=self.tolerance)

    def test_interruptions_move_no_end_of_thoughts(self, bench: Bench) -> None:
        greedy = SamplingParams(60, temperature=0, thinking=ThinkingBudget(30))
        requests = [GenerationRequest(prompt(length), greedy, 0) for length in (1, 7, 30)]
        whole = _turns(bench, requests, OpenThoughts())

        async def interrupted() -> tuple[list[Completion], int]:
            reasons: list[str] = []

            async def generate(request: GenerationRequest) -> Completion:
                part = await bench.generator.generate(request)
                reasons.append(part.stop_reason)
                return part

            tasks = [asyncio.create_task(generate_turn(generate, request, OpenThoughts())) for request in requests]
            period = 0.01
            while not all(task.done() for task in tasks):
                await asyncio.sleep(period)
                period *= 1.25
                await bench.generator.pause("interrupt")
                await bench.generator.resume()
            return [task.result() for task in tasks], reasons.count("abort")

        for _ in range(MAX_ROUNDS):
            found, num_interruptions = bench.runner.run(interrupted())
            for expected, completion in zip(whole, found, strict=True):
                assert completion.token_ids.tolist() == expected.token_ids.tolist()
                assert (completion.thinking, completion.spans) == (expected.thinking, expected.spans)
                np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=self.tolerance)
            if num_interruptions:
                return
        raise AssertionError("every request was over before it could be interrupted")

    @pytest.mark.parametrize("num_before", [1, 2])
    def test_a_stop_string_may_begin_before_an_interruption(self, bench: Bench, num_before: int) -> None:
        tokens, sampled, start = self._greedy_with_text(bench)
        stop = bench.reference.decode(sampled[start : start + 3])
        row = np.concatenate([tokens, np.array(sampled[: start + num_before], np.int32)])
        greedy = SamplingParams(12, temperature=0, stop_strings=("never, never", stop))
        request = GenerationRequest(row, greedy, 0, num_sampled=start + num_before)
        rest, other = _generate(bench, [request, GenerationRequest(row, greedy, 0)])
        assert rest.token_ids.tolist() == sampled[start + num_before : start + 3]
        assert rest.stop_reason == "stop"
        # a stop string is looked for in the completion, not in its prompt
        assert other.token_ids.tolist()[: 3 - num_before] == rest.token_ids.tolist()
        assert len(other.token_ids) > len(rest.token_ids)

    def _greedy_with_text(self, bench: Bench) -> tuple[np.ndarray, list[int], int]:
        """Return a prompt, its greedy continuation, and the index of three tokens in it whose text is unique."""
        for seed in range(40):
            tokens = prompt(8, seed)
            sampled = bench.reference.greedy(tokens, 16)
            pieces = [bench.reference.decode([token]) for token in sampled]
            text = bench.reference.decode(sampled)
            for start in range(2, 10):
                stop = "".join(pieces[start : start + 3])
                if all(piece and piece.isascii() for piece in pieces[start : start + 3]) and text.count(stop) == 1:
                    return tokens, sampled, start
        raise AssertionError("no completion with three ASCII tokens in a row")

    def test_a_seed_repeats_the_rest_of_a_completion_and_draws_other_numbers_than_before(self, bench: Bench) -> None:
        hot = SamplingParams(24, temperature=1.5)
        whole = _one(bench, prompt(9), hot, seed=4).token_ids
        row = np.concatenate([prompt(9), whole[:10]])
        request = GenerationRequest(row, SamplingParams(14, temperature=1.5), 4, num_sampled=10)
        rest = _generate(bench, [request, request])
        assert rest[0].token_ids.tolist() == rest[1].token_ids.tolist()
        if self.draws_by_place:
            assert rest[0].token_ids.tolist() == whole[10:].tolist()

    def test_every_token_has_the_logprob_of_the_weights_of_its_span(self, bench: Bench) -> None:
        rng = np.random.default_rng(0)
        filters = [SamplingParams(150), SamplingParams(150, temperature=0.7, top_p=0.9), SamplingParams(150, top_k=8)]
        requests = [GenerationRequest(prompt(3 + 9 * seed), filters[seed % 3], seed) for seed in range(6)]
        folders: dict[int, Path] = {}

        async def updating() -> list[Completion]:
            folders[await bench.sync(bench.first)] = bench.first
            tasks = [asyncio.create_task(generate_whole(bench.generator.generate, request)) for request in requests]
            for _ in range(4):
                await asyncio.sleep(float(rng.uniform(0, 0.06)))
                folder = bench.second if folders[bench.version] == bench.first else bench.first
                folders[await bench.sync(folder, mode="interrupt")] = folder
            return await asyncio.gather(*tasks)

        num_mixed = 0
        for _ in range(MAX_ROUNDS):
            for request, completion in zip(requests, bench.runner.run(updating()), strict=True):
                start = 0
                for span in completion.spans:
                    row = np.concatenate([request.token_ids, completion.token_ids[:start]])
                    sampled = completion.token_ids[start : start + span.num_tokens]
                    reference = bench.references[folders[span.version]]
                    found = completion.logprobs[start : start + span.num_tokens]
                    expected = reference.nearest_logprobs(found, row, sampled, request.sampling)
                    np.testing.assert_allclose(found, expected, atol=self.tolerance)
                    start += span.num_tokens
                assert (start, completion.stop_reason) == (150, "length")
                num_mixed += len(completion.spans) > 1
            if num_mixed >= 6:
                break
        bench.runner.run(bench.sync(bench.first))
        assert num_mixed >= 6


async def _interrupted(bench: Bench, request: GenerationRequest) -> Completion:
    """Return a part of the completion of a request; the generator stays paused."""
    for _ in range(MAX_ROUNDS):
        before = (await bench.generator.health())["num_sampled"]
        task = asyncio.create_task(bench.generator.generate(request))
        while not task.done() and (await bench.generator.health())["num_sampled"] < before + 3:
            await asyncio.sleep(0.001)
        await bench.generator.pause("interrupt")
        part = await task
        if part.stop_reason == "abort" and len(part.token_ids):
            return part
        await bench.generator.resume()
    raise AssertionError("every request was over before it could be interrupted")
