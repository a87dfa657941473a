"""The Megatron generator keeps the contract of every generator, and decodes every family."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import FAMILIES, LINEAR_FAMILIES, write_family, write_mixed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.generator import GeneratorSuite
from rl_core.testing.weights import model_config
from rl_core.torch.generation.row import Row
from rl_core.weights import Manifest, TensorSpec
from rl_megatron.generation.generator import MegatronGenerator, next_batch
from rl_megatron.generation.plugin import MegatronGenerationConfig

CPU = Placement("cpu")


class TestMegatronGenerator(GeneratorSuite):
    draws_by_place = True
    tolerance = 1e-4

    @classmethod
    def make_generator(cls, model_dir: Path) -> Generator:
        settings = MegatronGenerationConfig(max_batch_size=16, max_prefill_tokens=64)
        return MegatronGenerator(GenerationConfig(backend="megatron"), settings, model_config(model_dir), CPU)

    @classmethod
    async def make_head_stale(cls, generator: Generator) -> None:
        assert isinstance(generator, MegatronGenerator)
        chunk = generator._engine.model.model.chunks[0]
        chunk.output_layer.weight = torch.nn.Parameter(chunk.embedding.word_embeddings.weight.detach() + 1)
        chunk.share_embeddings_and_output_weights = False


def _run(
    folder: Path, requests: list[GenerationRequest], adopted: Path | None = None, precision: str = "float32"
) -> list[Completion]:
    """Completions of requests that are sent together, with the weights of another folder where one is given."""

    async def run() -> list[Completion]:
        config = ModelConfig(model_name=str(folder), precision=precision, max_total_sequence_length=128)
        settings = MegatronGenerationConfig(max_batch_size=4, max_prefill_tokens=24)
        generator = MegatronGenerator(GenerationConfig(backend="megatron"), settings, config, CPU)
        await generator.start()
        try:
            if adopted is not None:
                await asyncio.wrap_future(generator._engine.call(lambda: _adopt(generator, adopted)))
            return await asyncio.gather(*[generator.generate(request) for request in requests])
        finally:
            await generator.close()

    return asyncio.run(run())


def _adopt(generator: MegatronGenerator, folder: Path) -> None:
    sent = load_file(folder / "model.safetensors")
    decoder = generator._engine.model
    specs = tuple(TensorSpec(name, tuple(tensor.shape), _name(tensor.dtype)) for name, tensor in sent.items())
    adoption = decoder.adoption(Manifest(1, specs, decoder._weights.tied))
    for name, tensor in sent.items():
        adoption.take(name, tensor)
    adoption.verify()
    # what the files have in bfloat16 is held so or in more, and comes back the same
    held = dict(chain.from_iterable(decoder._weights.stream(_name(decoder.model.config.params_dtype))))
    assert all(held[name].equal(tensor) and held[name].dtype == tensor.dtype for name, tensor in sent.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_completions(model: Path, requests: list[GenerationRequest], completions: list[Completion]) -> None:
    """Hold them against plain forward passes of `transformers`."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids])).long()
        with torch.no_grad():
            logprobs = reference(tokens[None, :-1]).logits[0].log_softmax(-1)[len(request.token_ids) - 1 :]
        expected = logprobs.gather(1, tokens[len(request.token_ids) :, None])[:, 0]
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
        if request.sampling.temperature == 0:
            assert completion.token_ids.tolist() == logprobs.argmax(-1).tolist()


@pytest.mark.parametrize(
    "family",
    partly_exhaustive(
        [family for family in FAMILIES if family not in LINEAR_FAMILIES],
        # windows, latent attention, and stacked experts; layers as such are those of the trainer
        always=["mistral", "deepseek_v3", "gpt_oss"],
    ),
)
def test_every_family_is_decoded_with_the_logprobs_of_transformers(family: str, tmp_path: Path) -> None:
    first, second = (write_family(tmp_path / str(seed), family, seed=seed) for seed in (1, 2))
    draws = np.random.default_rng(0)
    # more rows than places, of lengths that are read together, apart and column by column
    requests = [
        GenerationRequest(
            draws.integers(3, 100, length).astype(np.int32), SamplingParams(20 - length % 5, temperature=seed % 2), seed
        )
        for seed, length in enumerate((1, 30, 9, 12, 9, 17, 48))
    ]
    _check_completions(second, requests, _run(first, requests, adopted=second))


@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        ("llama", r"norm\.weight$"),
        ("qwen3", r"embed_tokens\.weight$"),
        ("mistral", r"^lm_head\.weight$"),
        ("deepseek_v3", r"mlp\.gate\."),
    ],
)
def test_tensors_that_stay_float32_are_adopted_as_they_are(family: str, pattern: str, tmp_path: Path) -> None:
    first, second = (write_mixed(tmp_path / str(seed), family, pattern, seed=seed) for seed in (1, 2))
    request = GenerationRequest(np.arange(3, 12, dtype=np.int32), SamplingParams(6), 0)
    (completion,) = _run(first, [request], adopted=second, precision="bfloat16")
    assert len(completion.token_ids) == 6


def test_a_model_with_linear_attention_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation\.backend: .*linear attention.*generation\.backend=vllm"):
        _run(write_family(tmp_path, "qwen3_next"), [])


def test_a_batch_is_of_prompts_about_as_long_as_the_oldest() -> None:
    def row(length: int, limit: int) -> Row:
        return Row(GenerationRequest(np.ones(length, np.int32), SamplingParams(limit), 0), limit, None)

    waiting = deque([row(10, 4), row(15, 4), row(12, 4), row(90, 100), row(9, 4), row(10, 4)])
    waiting[2].future.cancel()
    assert [chosen.num_prompt_tokens for chosen in next_batch(waiting, 3)] == [10, 90, 9]
    assert [left.num_prompt_tokens for left in waiting] == [15, 10]
    assert [chosen.num_prompt_tokens for chosen in next_batch(waiting, 3)] == [15]
    assert next_batch(deque(), 3) == []


PLUGIN = """
from rl_megatron.families.dense import LLAMA

NAMED = LLAMA

def family_of(config):
    return LLAMA if config.model_type == "seed_oss" else None
"""


@pytest.mark.parametrize("entry", ["seed_oss = maps:NAMED", "any = maps:family_of"])
def test_another_package_adds_a_family(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site"
    information = package / "maps-1.0.dist-info"
    information.mkdir(parents=True)
    (package / "maps.py").write_text(PLUGIN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: maps\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[rl_megatron.families]\n{entry}\n")
    model = write_tiny_model(tmp_path / "model", "seed_oss", attention_bias=False)
    request = GenerationRequest(np.arange(3, 12, dtype=np.int32), SamplingParams(6), 0)
    with pytest.raises(ValueError, match=r"type 'seed_oss'.*rl_megatron\.families"):
        _run(model, [request])
    assert not torch.distributed.is_initialized()
    monkeypatch.syspath_prepend(package)
    monkeypatch.delitem(sys.modules, "maps", raising=False)
    _check_completions(model, [request], _run(model, [request]))
