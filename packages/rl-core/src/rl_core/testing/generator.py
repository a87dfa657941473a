"""Conformance suite of generators, for any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from rl_core.errors import RequestRefused
from rl_core.generation import GenerationRequest, SamplingParams
from rl_core.rollout import Completion
from rl_core.testing.torch.reference_model import EOS_TOKEN_ID, VOCAB_SIZE, processed_logprobs
from rl_core.testing.weights import CONTEXT, Bench, WeightSinkSuite, prompt

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


def _generate(bench: Bench, requests: Sequence[GenerationRequest]) -> list[Completion]:
    async def together() -> list[Completion]:
        return await asyncio.gather(*[bench.generator.generate(request) for request in requests])

    return bench.runner.run(together())


def _one(bench: Bench, token_ids: np.ndarray, sampling: SamplingParams, seed: int = 0) -> Completion:
    return _generate(bench, [GenerationRequest(token_ids, sampling, seed)])[0]


class GeneratorSuite(WeightSinkSuite):
    """Generation equals what `transformers` computes, and each request gets its own, however they are batched.

    ::

        class TestMyGenerator(GeneratorSuite):
            tolerance = 1e-4

            @classmethod
            def make_generator(cls, model_dir):
                return MyGenerator(GenerationConfig(), MyConfig(), model_config(model_dir), Placement("cpu"))

            @classmethod
            async def make_head_stale(cls, generator): ...
    """

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
            expected = bench.reference.completion_logprobs(request.token_ids, completion.token_ids, sampling)
            np.testing.assert_allclose(completion.logprobs, expected, atol=self.tolerance)

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
        free, stop = self._run_with_text(bench)
        completion = _one(bench, prompt(8), SamplingParams(32, stop_strings=("never, never", stop)), seed=free[1])
        texts = [bench.reference.decode(free[0][:count]) for count in range(1, 33)]
        end = next(count for count, text in enumerate(texts, start=1) if stop in text)
        assert completion.token_ids.tolist() == free[0][:end]
        assert completion.stop_reason == "stop"

    def _run_with_text(self, bench: Bench) -> tuple[tuple[list[int], int], str]:
        """A completion, its seed, and a text in it that spans three tokens."""
        for seed in range(40):
            tokens = _one(bench, prompt(8), SamplingParams(32), seed).token_ids.tolist()
            pieces = [bench.reference.decode([token]) for token in tokens]
            for start in range(4, 28):
                stop = "".join(pieces[start : start + 3])
                spans_tokens = all(piece and piece.isascii() for piece in pieces[start : start + 3])
                if spans_tokens and not any(stop in piece for piece in pieces) and min(tokens[start : start + 3]) > 2:
                    return (tokens, seed), stop
        raise AssertionError("no completion with three ASCII tokens in a row")

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

    def test_health_counts_tokens_while_requests_are_decoded(self, bench: Bench) -> None:
        async def num_sampled() -> int:
            numbers = await asyncio.wait_for(bench.generator.health(), 30)
            assert all(np.isfinite(value) for value in numbers.values())
            return int(numbers["num_sampled"])

        async def asking() -> None:
            requests = [GenerationRequest(prompt(5), SamplingParams(200), seed) for seed in range(8)]
            await bench.generator.score(prompt(5))  # the last step of requests before is over, and its tokens counted
            before = await num_sampled()
            tasks = [asyncio.create_task(bench.generator.generate(request)) for request in requests]
            seen = set()
            while not all(task.done() for task in tasks):
                seen.add(await num_sampled() - before)
                await asyncio.sleep(0.002)
            while (counted := await num_sampled() - before) < 8 * 200:  # those of the last step follow its completions
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
