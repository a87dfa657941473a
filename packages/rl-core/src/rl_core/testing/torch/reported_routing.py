"""Generators report the experts that they chose, and a trainer replays them: the suite of every such generator."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, Placement, SamplingParams
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.rollout import Completion
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.testing.torch.routed_oracle import batch_of, routing_of

REQUESTS = tuple(
    GenerationRequest(
        np.random.default_rng(seed).integers(3, 100, length).astype(np.int32), SamplingParams(30 - length), seed
    )
    for seed, length in enumerate((1, 12, 9, 12, 9, 17, 20))
)


class ReportedRoutingSuite(ABC):
    """Subclass it in a module with a fixture `ranks`, a `RankPool`."""

    factory: ClassVar[str]
    """`"module:function"` that builds a worker of the backend whose config has `moe_router_replay`."""

    @classmethod
    @abstractmethod
    def write(cls, folder: Path) -> Path:
        """Write the files of a tiny mixture of experts; returns their folder."""

    @classmethod
    @abstractmethod
    def make_generator(cls, model: ModelConfig, placement: Placement) -> Generator:
        """Yield a generator of this model that decodes fewer requests together than there are."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return the model's files."""
        return cls.write(tmp_path_factory.mktemp("routed"))

    @pytest.mark.parametrize("in_parts", [False, True])
    def test_completions_report_the_experts_that_transformers_sends_their_tokens_to(
        self, folder: Path, *, in_parts: bool
    ) -> None:
        completions = self._completions(folder, "float32", in_parts=in_parts)
        for request, completion in zip(REQUESTS, completions, strict=True):
            assert completion.routed_experts is not None
            assert completion.routed_experts.dtype == np.int16
            tokens = np.concatenate([request.token_ids, completion.token_ids])
            # the last token is sampled and never fed
            expected = routing_of(folder, tokens[:-1])
            np.testing.assert_array_equal(np.sort(completion.routed_experts, -1), expected)

    def test_a_trainer_that_replays_a_generators_routing_agrees_with_it_more(
        self, ranks: RankPool, folder: Path
    ) -> None:
        batch = batch_of(REQUESTS, self._completions(folder, "bfloat16"))
        generated = batch.ragged("generation_logprobs").values
        config = ModelConfig(model_name=str(folder), precision="float32")
        differences = []
        for replays in (True, False):
            with PooledModel(ranks, self.factory, config, ModelSpec(), 1, moe_router_replay=replays) as model:
                found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
            differences.append(np.abs(np.exp(found - generated) - 1)[~np.isnan(generated)])
        replayed, free = differences
        assert replayed.mean() < free.mean() / 1.5
        assert replayed.max() < free.max() / 1.5

    def _completions(
        self, folder: Path, precision: Literal["float32", "bfloat16"], *, in_parts: bool = False
    ) -> Sequence[Completion]:
        """Return those of all requests, which are of different lengths.

        Args:
            folder: Folder of the model.
            precision: Dtype that the generator computes in.
            in_parts: True to end them after every four tokens, as interruptions would, and continue.
        """

        async def run() -> Sequence[Completion]:
            model = ModelConfig(model_name=str(folder), precision=precision, max_total_sequence_length=64)
            generator = self.make_generator(model, Placement("cpu", reports_routing=True))
            await generator.start()
            try:
                if not in_parts:
                    return await asyncio.gather(*[generator.generate(request) for request in REQUESTS])

                async def part(request: GenerationRequest) -> Completion:
                    sampling = replace(request.sampling, max_new_tokens=min(4, request.sampling.max_new_tokens))
                    return replace(await generator.generate(replace(request, sampling=sampling)), stop_reason="abort")

                return await asyncio.gather(*[generate_whole(part, request) for request in REQUESTS])
            finally:
                await generator.close()

        return asyncio.run(run())
