from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from rl_core.errors import ConfigError, GeneratorError, RequestRefused
from rl_core.model_config import GenerationConfig, ModelConfig
from rl_core.rollouts.generation import GenerationRequest, Placement, SamplingParams
from rl_core.rollouts.rollout import Completion
from rl_core.selfcheck.torch.tiny_model import write_composite
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.torch.reference_model import ReferenceModel, write_reference_model
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig
from rl_dtensor.selfcheck import SMALL as SIZES
from rl_dtensor.selfcheck import shrink

SMALL = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {**SIZES, "vocab_size": 120}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL, head_dim=8),
    "qwen2": Qwen2Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=6, head_dim=8),
    "gemma2": Gemma2Config(**SMALL, sliding_window=6, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=None),
    "gpt2": GPT2Config(
        vocab_size=120, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=1, eos_token_id=2
    ),
}


def _config(folder: Path, **changes: Any) -> ModelConfig:
    settings = {"precision": "float32", "max_total_sequence_length": 128, "logprob_chunk_size": 5, **changes}
    return ModelConfig(model_name=str(folder), **settings)


def _generate(
    model: ModelConfig, requests: Sequence[GenerationRequest], backend: HFConfig | None = None
) -> list[Completion]:
    return _with_generator(model, backend, lambda generator: [generator.generate(request) for request in requests])


def _with_generator(
    model: ModelConfig, backend: HFConfig | None, calls: Callable[[HFGenerator], list[Awaitable[Any]]]
) -> list[Any]:
    async def run() -> list[Any]:
        generator = HFGenerator(GenerationConfig(backend="hf"), backend or HFConfig(), model, Placement("cpu"))
        await generator.start()
        try:
            return await asyncio.gather(*calls(generator))
        finally:
            await generator.close()

    return asyncio.run(run())


def _requests(count: int) -> list[GenerationRequest]:
    draws = np.random.default_rng(0)
    return [
        GenerationRequest(draws.integers(3, 120, 1 + 7 * (seed % 5)).astype(np.int32), SamplingParams(4 + seed), seed)
        for seed in range(count)
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_length_get_the_logprobs_of_a_plain_forward_pass(
    family: str, attention: Any, tmp_path: Path
) -> None:
    _check_decoding(FAMILIES[family], attention, tmp_path)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_next", {}),  # a gated delta rule
        pytest.param("kimi_linear", {"linear_num_heads": 4, "linear_head_dim": 16}, marks=exhaustive),
        pytest.param("falcon_h1", {}, marks=exhaustive),  # Mamba beside attention in every layer
        pytest.param("jamba", {}, marks=exhaustive),  # reads several tokens behind a state as if there were none
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),  # short convolutions
    ],
)
def test_rows_of_models_that_carry_states_do_too(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = shrink(AutoConfig.for_model(family, **fields), TINY)
    config.update({"initializer_range": 0.2, "eos_token_id": None})
    _check_decoding(config, "sdpa", tmp_path)


def _check_decoding(config: PreTrainedConfig, attention: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    requests = _requests(6)
    # few places and a small prefill, so that rows join and leave while others are under way
    backend = HFConfig(max_batch_size=4, max_prefill_tokens=40, attn_implementation=attention)
    completions = _generate(_config(tmp_path), requests, backend)
    rows = [np.concatenate([one.token_ids, other.token_ids]) for one, other in zip(requests, completions, strict=True)]
    scores = _with_generator(_config(tmp_path), backend, lambda generator: [generator.score(row) for row in rows])
    for request, completion, score in zip(requests, completions, scores, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.token_ids, completion.token_ids])).long()
        with torch.no_grad():
            logprobs = reference(tokens[None, :-1]).logits[0].log_softmax(-1)
        expected = logprobs.gather(1, tokens[1:, None])[len(request.token_ids) - 1 :, 0]
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        np.testing.assert_allclose(score[len(request.token_ids) :], expected, atol=1e-5)


def test_the_size_of_the_batch_changes_no_token(tmp_path: Path) -> None:
    model = _config(write_reference_model(tmp_path, seed=0))
    requests = _requests(12)
    together = _generate(model, requests)
    for size in (1, 3):
        apart = _generate(model, requests, HFConfig(max_batch_size=size, max_prefill_tokens=1))
        assert [c.token_ids.tolist() for c in apart] == [c.token_ids.tolist() for c in together]


def test_the_language_model_of_a_composite_model_generates(tmp_path: Path) -> None:
    language = write_reference_model(tmp_path / "language", seed=0)
    composite = write_reference_model(tmp_path / "composite", seed=1)  # for its tokenizer
    write_composite(composite, "llava", language)
    requests = _requests(3)
    found, expected = (_generate(_config(folder), requests) for folder in (composite, language))
    assert [one.token_ids.tolist() for one in found] == [one.token_ids.tolist() for one in expected]


def test_weights_that_the_files_lack_are_not_made_up(tmp_path: Path) -> None:
    write_reference_model(tmp_path, seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack model\.norm\.weight; save the whole model"):
        _generate(_config(tmp_path), _requests(1))


def test_precision_is_the_models(tmp_path: Path) -> None:
    write_reference_model(tmp_path, seed=0)
    request = _requests(3)[2]
    completion = _generate(_config(tmp_path, precision="bfloat16"), [request])[0]
    expected = ReferenceModel(tmp_path).completion_logprobs(request.token_ids, completion.token_ids)
    error = np.abs(completion.logprobs - expected).max()
    assert 1e-4 < error < 0.3


def test_overrides_reach_the_model_and_unknown_ones_are_named(tmp_path: Path) -> None:
    write_reference_model(tmp_path, seed=0)
    requests = _requests(2)
    plain = _generate(_config(tmp_path), requests)
    other = _generate(_config(tmp_path, hf_config_overrides={"rms_norm_eps": 10.0}), requests)
    assert not np.allclose(plain[1].logprobs[:1], other[1].logprobs[:1])
    with pytest.raises(ConfigError, match="rms_norm_epsilon"):
        _generate(_config(tmp_path, hf_config_overrides={"rms_norm_epsilon": 10.0}), requests)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("nemotron_h", {"time_step_min": 0.5}, "logprobs are off"),  # the limit of steps holds for one pass alone
        pytest.param("recurrent_gemma", {}, "logprobs are off", marks=exhaustive),  # its states are not in the cache
        pytest.param("minimax", {}, "MiniMax uses cache of its own", marks=exhaustive),
        ("llama4_text", {}, "its layers are chunked_attention"),
    ],
)
def test_models_that_a_cache_does_not_serve_are_decoded_without_one(
    family: str, fields: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = shrink(AutoConfig.for_model(family, **fields), TINY)
    config.update({"initializer_range": 0.2, "eos_token_id": None})
    _check_decoding(config, "eager", tmp_path)
    warned = [record.getMessage() for record in caplog.records if "without a cache" in record.getMessage()]
    assert len(warned) == 2, "once for each generator"
    assert all(said in message for message in warned)


def test_without_a_cache_no_pass_has_more_tokens_than_it_may_and_none_is_padded(tmp_path: Path) -> None:
    config = shrink(AutoConfig.for_model("minimax"), TINY)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    shapes: list[tuple[int, ...]] = []

    def calls(generator: HFGenerator) -> list[Awaitable[Any]]:
        module = generator._engine.model.module
        module.register_forward_pre_hook(
            lambda _module, _args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return [generator.generate(request) for request in _requests(9)]

    together = _with_generator(_config(tmp_path), HFConfig(max_prefill_tokens=64), calls)
    assert max(rows for rows, _ in shapes) > 1
    assert all(rows * columns <= 64 for rows, columns in shapes)
    apart = _generate(_config(tmp_path), _requests(9), HFConfig(max_batch_size=1))
    assert [c.token_ids.tolist() for c in apart] == [c.token_ids.tolist() for c in together]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("bert", r"start of a row than for the row \(off by"),  # whose tokens see those behind them
        ("xmod", r"fails in a plain pass \(ValueError: Input language unknown"),
    ],
)
def test_a_model_that_cannot_be_decoded_in_any_way_is_refused(family: str, said: str, tmp_path: Path) -> None:
    config = shrink(AutoConfig.for_model(family), TINY)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{said}.*another generation.backend"):
        _generate(_config(tmp_path), _requests(1))


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, sliding_window=6, head_dim=8, attn_logit_softcapping=5.0),  # whose softcap it would drop
        shrink(AutoConfig.for_model("gpt_oss"), TINY),
    ],
    ids=["gemma2", "gpt_oss"],
)
def test_attention_that_sdpa_does_not_compute_is_eager_unless_sdpa_is_asked_for(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attn_implementation=eager"):
        _generate(_config(tmp_path), _requests(1), HFConfig(attn_implementation="sdpa"))
    eager = _generate(_config(tmp_path), _requests(1), HFConfig(attn_implementation="eager"))
    assert str(_generate(_config(tmp_path), _requests(1))) == str(eager)


def test_a_vision_language_model_without_a_language_model_of_its_own_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    said = r"no causal language model of the type qwen2_5_vl.*policy\.vision\.enabled=true"
    with pytest.raises(ConfigError, match=said):
        _generate(_config(tmp_path), _requests(1))


def test_images_for_a_language_model_are_refused(tmp_path: Path) -> None:
    model = _config(write_reference_model(tmp_path, seed=0))
    (request,) = _requests(1)
    with pytest.raises(RequestRefused, match=r"has images.*set policy\.vision\.enabled"):
        _generate(model, [replace(request, images=("0" * 32,))])


def test_an_engine_that_dies_fails_what_is_in_flight_and_all_that_follows(tmp_path: Path) -> None:
    model = _config(write_reference_model(tmp_path, seed=0), max_total_sequence_length=1024)

    async def run() -> None:
        generator = HFGenerator(GenerationConfig(backend="hf"), HFConfig(), model, Placement("cpu"))
        await generator.start()
        flying = asyncio.create_task(
            generator.generate(GenerationRequest(np.array([5], np.int32), SamplingParams(900), 0))
        )
        await asyncio.sleep(0.05)
        norm = generator._engine.model.module.model.norm
        # between two steps the model breaks, as it does where a device fails
        await asyncio.wrap_future(generator._engine.call(lambda: setattr(norm.weight, "data", torch.zeros(3))))
        with pytest.raises(GeneratorError, match="died"):
            await flying
        with pytest.raises(GeneratorError, match="died"):
            await generator.generate(_requests(1)[0])
        with pytest.raises(GeneratorError, match="died"):
            await generator.health()
        await generator.close()

    asyncio.run(run())


def test_close_fails_what_is_in_flight_and_held_back(tmp_path: Path) -> None:
    model = _config(write_reference_model(tmp_path, seed=0), max_total_sequence_length=1024)

    async def run() -> None:
        generator = HFGenerator(GenerationConfig(backend="hf"), HFConfig(), model, Placement("cpu"))
        await generator.start()
        request = GenerationRequest(np.array([5], np.int32), SamplingParams(900), 0)
        flying = asyncio.create_task(generator.generate(request))
        await asyncio.sleep(0.05)
        generator._serving.clear()
        held_back = asyncio.create_task(generator.generate(request))
        await asyncio.sleep(0)
        await generator.close()
        for task in (flying, held_back):
            with pytest.raises(GeneratorError, match="closed"):
                await task

    asyncio.run(run())


def test_a_missing_model_is_the_error_of_start(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        _generate(_config(tmp_path / "nothing"), _requests(1))
