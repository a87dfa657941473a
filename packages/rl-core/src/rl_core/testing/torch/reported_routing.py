"""Generators report the experts that they chose, and a trainer replays them: the suite of every such generator."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, Placement, SamplingParams
from rl_core.rollouts.group import GENERATION_LOGPROBS, ROUTED_EXPERTS
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.rollout import Completion, unknown_routing
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.selfcheck.torch.oracle import Oracle

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
            # The last token is sampled and never fed.
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
        """Return the completions of all requests, which have different lengths.

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


def with_random_routing(batch: Batch, num_layers: int, num_experts: int, num_chosen: int) -> Batch:
    """Return the rows with random experts for each token; for some tokens none, which the router then chooses for."""
    tokens = batch.ragged(TOKENS)
    rng = np.random.default_rng(7)
    shape = (len(tokens.values), num_layers, num_experts)
    experts = rng.random(shape).argsort(-1)[..., :num_chosen].astype(np.int16)
    experts[rng.random(len(tokens.values)) < 0.3] = -1
    return batch.with_columns({ROUTED_EXPERTS: tokens.like(experts)})


def routing_of(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Return int64 `[tokens, layers, experts per token]`, in ascending order, to which transformers sends the tokens of
    a row; -1 in layers without experts."""
    model = Oracle(folder).model
    found = np.full((len(tokens), model.config.num_hidden_layers, model.config.num_experts_per_tok), -1)

    def take(layer: int, router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        found[:, layer] = outputs[2].sort(-1).values.numpy()

    for number, layer in enumerate(model.model.layers):
        if "gate" in dict(layer.mlp.named_children()):
            layer.mlp.gate.register_forward_hook(partial(take, number))
    with torch.no_grad():
        model(torch.from_numpy(tokens.astype(np.int64))[None])
    return found


def batch_of(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> Batch:
    """Return the rows of `tokens`, `generation_logprobs` (NaN for prompts) and `routed_experts`, as rollouts have
    them."""
    rows = []
    for request, completion in zip(requests, completions, strict=True):
        assert completion.routed_experts is not None
        tokens = np.concatenate([request.token_ids, completion.token_ids])
        logprobs = np.concatenate([np.full(len(request.token_ids), np.nan), completion.logprobs])
        missing = unknown_routing(len(tokens) - len(completion.routed_experts), completion.routed_experts.shape[1:])
        rows.append((tokens, logprobs, np.concatenate([completion.routed_experts, missing])))
    tokens, logprobs, experts = zip(*rows, strict=True)
    return Batch(
        {
            TOKENS: Ragged.from_rows(tokens, np.int32),
            GENERATION_LOGPROBS: Ragged.from_rows(logprobs, np.float32),
            ROUTED_EXPERTS: Ragged.from_rows(experts, np.int16, experts[0].shape[1:]),
        }
    )


class RoutedOracle(Oracle):
    """Overrules the routers of transformers' Qwen3-MoE, and so of models of its form that normalise the weights of the
    chosen experts.

    Args:
        folder: Hugging Face files.
        batch: Batch with `routed_experts` of every row that it is asked for; rows differ.
    """

    def __init__(self, folder: Path, batch: Batch) -> None:
        super().__init__(folder)
        both = zip(batch.ragged(TOKENS), batch.ragged(ROUTED_EXPERTS), strict=True)
        rows = {tuple(tokens.tolist()): experts for tokens, experts in both}
        self._given = torch.zeros(0)

        def remember(module: nn.Module, args: Any, kwargs: Any) -> None:
            tokens = tuple(kwargs["input_ids"][0].tolist())
            self._given = torch.from_numpy(np.asarray(rows[tokens])).long()

        self.model.register_forward_pre_hook(remember, with_kwargs=True)
        for number, layer in enumerate(self.model.model.layers):
            if "gate" in dict(layer.mlp.named_children()):
                layer.mlp.gate.register_forward_hook(self._overrule(number))

    def _overrule(self, layer: int) -> Any:
        def hook(router: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits, _, own = outputs
            given = self._given[:, layer]
            experts = torch.where(given < 0, own, given)
            weights = logits.softmax(-1).gather(1, experts)
            return logits, weights / weights.sum(-1, keepdim=True), experts

        return hook
