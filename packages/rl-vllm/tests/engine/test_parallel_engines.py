"""The choice among data-parallel engines."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rl_vllm.engine import parallel_engines
from rl_vllm.engine.parallel_engines import BLOCK, SLACK, ParallelEngines


def tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_new_prompts_go_to_the_engine_with_the_fewest_requests() -> None:
    engines = ParallelEngines(3)
    chosen = [engines.choose(str(seed), tokens(200, seed)) for seed in range(9)]
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3}
    engines.leave("4")
    assert engines.choose("next", tokens(200, 99)) == chosen[4]


def test_turns_and_completions_of_a_prompt_go_where_its_beginning_is() -> None:
    engines = ParallelEngines(4)
    prompts = {seed: tokens(3 * BLOCK + 5, seed) for seed in range(8)}
    first = {seed: engines.choose(f"first-{seed}", prompt) for seed, prompt in prompts.items()}
    for seed, prompt in reversed(prompts.items()):
        assert engines.choose(f"again-{seed}", prompt) == first[seed]
        assert engines.choose(f"later-{seed}", prompt + tokens(300, seed + 100)) == first[seed]


def test_an_engine_that_is_much_busier_is_passed_over() -> None:
    engines = ParallelEngines(2)
    shared = tokens(4 * BLOCK, 0)
    chosen = [engines.choose(str(number), shared + tokens(BLOCK, number + 1)) for number in range(200)]
    counts = Counter(chosen)
    assert abs(counts[0] - counts[1]) <= SLACK + 0.25 * min(counts.values()) + 1
    for number in range(200):
        engines.leave(str(number))
    engines.leave("unknown")
    assert [engines.choose(f"a{each}", tokens(10, each)) for each in range(4)] == [0, 1, 0, 1]


def test_prompts_are_forgotten_with_the_cache_and_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_engines, "MAX_BLOCKS", 4)
    engines = ParallelEngines(2)
    prompts = [tokens(BLOCK, seed) for seed in range(7)]
    for number, prompt in enumerate(prompts):
        engines.choose(str(number), prompt)
    assert len(engines._seen) == 4
    assert engines.choose("kept", prompts[6]) == 0
    engines.forget()
    assert engines.choose("forgotten", prompts[6]) == 1
