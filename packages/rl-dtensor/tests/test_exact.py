"""Trainer and generator compute the same bits for the logprobs of sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen2Config

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import GenerationConfig, ModelConfig, OptimizerConfig, SequencePackingConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import RankPool
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_core.token_filter import TokenFilter
from rl_core.torch.kernels.exact import exact_rows
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig
from rl_dtensor.model.exact import attend_in_blocks, exact_attention
from rl_dtensor.model.kernels import Softmax, kernel_of
from rl_dtensor.model.layout import Segment, Segments

# Neither the widths nor the vocabulary are multiples of a vector register, and the longest row has several blocks.
SMALL = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**{**SMALL, "hidden_size": 40}),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2": Gemma2Config(
        **{**SMALL, "sliding_window": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
    ),
}
LENGTHS = (1, 3, 11, 11, 11, 70)
"""Tokens of prompts; three are the same prompt, as in a group."""

NEAR = SamplingParams(24)
PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, logprob_mb_tokens=150)}
PADDED = {"sequence_packing": SequencePackingConfig(enabled=False)}


def write(folder: Path, config: PreTrainedConfig, seed: int = 3) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    settings = {"precision": "float32", "max_total_sequence_length": 128, "logprob_chunk_size": 7, **changes}
    return ModelConfig(model_name=str(folder), **settings)


class Sampler:
    """A generator on its own event loop."""

    def __init__(self, folder: Path, *, exact: bool = True) -> None:
        generation = GenerationConfig(backend="hf", exact=exact)
        backend = HFConfig(max_batch_size=4, max_prefill_tokens=64)  # Rows join and leave others.
        self.generator = HFGenerator(generation, backend, config_of(folder), Placement("cpu"))
        self.runner = asyncio.Runner()

    def __enter__(self) -> Sampler:
        self.runner.run(self.generator.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.generator.close())
        self.runner.close()

    def rollouts(self, sampling: SamplingParams = NEAR) -> tuple[Batch, np.ndarray]:
        """Return rows of prompts with completions of different lengths, and the logprobs; NaN for prompts."""
        draws = np.random.default_rng(0)
        prompts = [draws.integers(3, 120, length).astype(np.int32) for length in LENGTHS]
        prompts[3:5] = [prompts[2]] * 2
        limits = [sampling.max_new_tokens - 3 * index for index in range(len(prompts))]
        requests = [
            GenerationRequest(tokens, replace(sampling, max_new_tokens=limit), seed)
            for seed, (tokens, limit) in enumerate(zip(prompts, limits, strict=True))
        ]

        async def sample() -> Sequence[Completion]:
            return await asyncio.gather(*[self.generator.generate(request) for request in requests])

        pairs = list(zip(prompts, self.runner.run(sample()), strict=True))
        tokens = [np.concatenate([given, made.token_ids]) for given, made in pairs]
        logprobs = [np.concatenate([np.full(len(given), np.nan), made.logprobs]) for given, made in pairs]
        return Batch({TOKENS: Ragged.from_rows(tokens, np.int32)}), np.concatenate(logprobs).astype(np.float32)

    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the weights, as a weight sync does."""
        held = self.generator._engine.model.module.state_dict()
        with torch.no_grad():
            for name, tensor in weights.items():
                held[name].copy_(tensor)


def rollouts(folder: Path, sampling: SamplingParams = NEAR, *, exact: bool = True) -> tuple[Batch, np.ndarray]:
    with Sampler(folder, exact=exact) as sampler:
        return sampler.rollouts(sampling)


def largest_difference(
    ranks: RankPool,
    folder: Path,
    rolled: tuple[Batch, np.ndarray],
    num_ranks: int = 1,
    *,
    exact: bool = True,
    temperature: float = 1.0,
    token_filter: TokenFilter | None = None,
    layout: dict[str, Any] | None = None,
    **settings: Any,
) -> float:
    batch, generated = rolled
    read = replace(LOGPROBS, token_filter=token_filter)
    config = config_of(folder, **(layout or PACKED))
    with PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(exact=exact), num_ranks, **settings) as model:
        found = model.infer(batch, [read], temperature=temperature).ragged("logprobs").values
    return float(np.nanmax(np.abs(found - generated)))


MESHES = {
    "one rank": (1, {}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"context_parallel_size": 2}),
    "ulysses": (2, {"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2 fsdp2": (4, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize(
    ("family", "meshes"),
    [("gemma2", ("tp2 sp",)), *(pytest.param(family, tuple(MESHES), marks=exhaustive) for family in FAMILIES)],
)
def test_the_logprobs_are_the_generators_on_every_mesh(
    ranks: RankPool, tmp_path: Path, family: str, meshes: Sequence[str]
) -> None:
    folder = write(tmp_path, FAMILIES[family])
    rolled = rollouts(folder)
    found = {name: largest_difference(ranks, folder, rolled, MESHES[name][0], **MESHES[name][1]) for name in meshes}
    assert found == dict.fromkeys(meshes, 0.0)


def test_without_exact_they_differ(ranks: RankPool, tmp_path: Path) -> None:
    folder = write(tmp_path, FAMILIES["qwen2"])
    assert largest_difference(ranks, folder, rollouts(folder, exact=False), exact=False) > 0


@pytest.mark.parametrize(
    ("temperature", "token_filter"),
    partly_exhaustive(
        [
            (0.7, None),
            (1.3, TokenFilter(top_p=0.8)),
            (1.0, TokenFilter(top_k=9, min_p=0.02)),
            (0.5, TokenFilter(top_p=0.5)),
        ],
        always=[(1.3, TokenFilter(top_p=0.8))],
    ),
)
def test_temperatures_and_filters_are_exact(
    ranks: RankPool, tmp_path: Path, temperature: float, token_filter: TokenFilter | None
) -> None:
    folder = write(tmp_path, FAMILIES["qwen2"])
    kept = token_filter or TokenFilter()
    sampling = SamplingParams(24, temperature, top_k=kept.top_k, top_p=kept.top_p, min_p=kept.min_p)
    rolled = rollouts(folder, sampling)
    read = {"temperature": temperature, "token_filter": token_filter}
    assert largest_difference(ranks, folder, rolled, **read) == 0
    assert largest_difference(ranks, folder, rolled, 2, **read, tensor_parallel_size=2) == 0
    assert largest_difference(ranks, folder, rolled, 2, **read, layout=PADDED) == 0


def test_scores_of_given_rows_are_exact(ranks: RankPool, tmp_path: Path) -> None:
    folder = write(tmp_path, FAMILIES["gemma2"])
    tokens = np.random.default_rng(1).integers(3, 120, 90).astype(np.int32)
    with Sampler(folder) as sampler:
        found = np.concatenate([[np.nan], sampler.runner.run(sampler.generator.score(tokens))[1:]])
    rolled = Batch({TOKENS: Ragged.from_rows([tokens], np.int32)}), found.astype(np.float32)
    assert largest_difference(ranks, folder, rolled) == 0


@pytest.mark.parametrize("mesh", partly_exhaustive(["fsdp2", "tp2 sp", "tp2 fsdp2"], always=["fsdp2"]))
def test_updates_keep_them_equal(ranks: RankPool, tmp_path: Path, mesh: str) -> None:
    assert differences_over_updates(ranks, tmp_path, *MESHES[mesh], updates=3) == [0.0] * 3


def differences_over_updates(
    ranks: RankPool, folder: Path, num_ranks: int, settings: Mapping[str, Any], *, updates: int
) -> list[float]:
    """Sample, read and train, with the new weights in the generator after each update; return what differed."""
    found = []
    write(folder, FAMILIES["qwen2"])
    optimizer = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3})
    config, spec = config_of(folder, optimizer=optimizer, **PACKED), ModelSpec(exact=True)
    with (
        Sampler(folder) as sampler,
        PooledModel(ranks, "dtensor_factories:build", config, spec, num_ranks, **settings) as model,
    ):
        before = {name: tensor.clone() for name, tensor in sampler.generator._engine.model.module.state_dict().items()}
        for number in range(updates):
            batch, generated = sampler.rollouts()
            read = model.infer(batch, [LOGPROBS]).ragged("logprobs")
            found.append(float(np.nanmax(np.abs(read.values - generated))))
            columns = make_batch(tuple(batch.ragged(TOKENS).lengths), seed=number)
            model.train_step(columns.with_columns({TOKENS: batch.ragged(TOKENS)}), TokenLoss())
            model.export(str(folder / f"update{number}"))
            weights = load_file(folder / f"update{number}" / "model.safetensors")
            sampler.adopt(weights)
        assert any(not torch.equal(before[name], tensor) for name, tensor in weights.items())
    return found


@pytest.mark.parametrize(
    "softmax", [Softmax(), Softmax(0.3, window=33, softcap=3.0), Softmax(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))]
)
def test_attention_in_blocks_is_that_of_the_eager_kernel(softmax: Softmax) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 190, 10, dtype=torch.float64) for heads in (4, 2, 2))
    items = [Segment((0, 150), (0, 150)), Segment((150, 190), (40, 190))]
    segments, grad = Segments(items, query.device), torch.randn_like(query)
    found = []
    for attend in (exact_attention, kernel_of("eager")):
        inputs = [each.clone().requires_grad_() for each in (query, key, value)]
        out = attend(*inputs, segments, softmax)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    torch.testing.assert_close(*found)
    # A query has the same bits alone, with the keys up to its own, and among others with more keys.
    query, key, value = (part.float() for part in (query, key, value))
    with exact_rows():
        whole = exact_attention(query, key, value, Segments([Segment((0, 190), (0, 190))], query.device), softmax)
        for place in (0, 63, 64, 130):
            own, end = slice(place, place + 1), place + 1
            alone = attend_in_blocks(
                query[:, :, own], key[:, :, :end], value[:, :, :end], torch.tensor([[place]]), softmax
            )
            assert torch.equal(alone, whole[:, :, own])


def test_a_model_that_is_not_exact_is_refused(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    folder = write(tmp_path, GptOssConfig(**{**SMALL, **experts, "head_dim": 8}))
    with pytest.raises(ConfigError, match=r"policy.generation.exact: .*experts"):
        rollouts(folder)
