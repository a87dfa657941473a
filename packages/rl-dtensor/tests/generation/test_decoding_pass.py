"""The decoding pass computes what the code of `transformers` computes, or is not taken."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl_core.devices import device_named
from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.files.file_names import FileNames
from rl_core.torch.generation.row import Row
from rl_core.weights import Manifest, TensorSpec
from rl_dtensor.generation.cache import RowLayer, row_layers
from rl_dtensor.generation.generator import HFDecoder
from rl_dtensor.generation.loading import decoding_pass
from rl_dtensor.generation.plugin import HFConfig
from rl_dtensor.model.tiny import shrink

USUAL = ("llama", "qwen2", "qwen3", "gemma", "olmo", "phimoe", "starcoder2", "qwen3_moe", "glm4_moe")
OTHERS = ("arcee", "aria_text", "dots1", "hy_v3", "jais2", "mixtral", "qwen2_moe", "seed_oss", "solar_open")


def _model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    config = shrink(AutoConfig.for_model(family))
    config.update({"eos_token_id": None, **fields})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.to(dtype).eval().requires_grad_(False)


def _decoder(model: PreTrainedModel, *, own: bool, max_batch_size: int = 4) -> HFDecoder:
    kinds = row_layers(model.config)
    found = decoding_pass(model, kinds, "the model") if own else None
    assert (found is not None) == own
    config = HFConfig(max_batch_size=max_batch_size, max_prefill_tokens=40)
    device = device_named("cpu")
    return HFDecoder(model, kinds, config, device, chunk_size=None, recorder=None, decoding_pass=found)


def _decoded(decoder: HFDecoder) -> list[tuple[list[int], np.ndarray]]:
    """Return tokens and logprobs of rows of many lengths, which join and leave while others are decoded."""
    draws = np.random.default_rng(0)
    lengths = [1 + 7 * (seed % 5) for seed in range(8)]
    requests = [
        GenerationRequest(draws.integers(3, 101, length).astype(np.int32), SamplingParams(3 + 5 * (seed % 4)), seed)
        for seed, length in enumerate(lengths)
    ]
    rows = [Row(request, request.sampling.max_new_tokens, None) for request in requests]
    waiting = deque(rows)
    while waiting or decoder.rows:
        decoder.admit(waiting, 0)
        decoder.step(0)
    found = [row.future.result() for row in rows]
    return [(completion.token_ids.tolist(), completion.logprobs) for completion in found]


@pytest.mark.parametrize("family", [*USUAL, *(pytest.param(family, marks=exhaustive) for family in OTHERS)])
def test_tokens_and_logprobs_are_those_of_the_models_own_code(family: str) -> None:
    expected = _decoded(_decoder(_model(family), own=False))
    found = _decoded(_decoder(_model(family), own=True))
    for (tokens, logprobs), (own_tokens, own_logprobs) in zip(expected, found, strict=True):
        assert own_tokens == tokens
        np.testing.assert_allclose(own_logprobs, logprobs, atol=1e-6, rtol=1e-6)


def test_in_half_precision_the_family_decides_what_is_rounded() -> None:
    expected = _decoded(_decoder(_model("qwen3", dtype=torch.bfloat16), own=False))
    found = _decoded(_decoder(_model("qwen3", dtype=torch.bfloat16), own=True))
    # Rounding may draw another token, so that logprobs are compared up to the second token of equal rows.
    first = [(one[1][1], other[1][1]) for one, other in zip(expected, found, strict=True) if one[0][:2] == other[0][:2]]
    assert len(first) > 5
    assert max(abs(one - other) for one, other in first) < 0.05


class Quantised(nn.Linear):
    pass


def _quantised() -> PreTrainedModel:
    model = _model("qwen3")
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Quantised
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: _model("mistral"), "computes something else"),  # a sliding window
        (lambda: _model("ministral3"), "computes something else"),  # queries scaled at far places
        (lambda: _model("smollm3"), "computes something else"),  # layers without rotation
        (lambda: _model("gemma3_text"), "other things than attention and an MLP"),  # norms after the parts
        (lambda: _model("olmoe"), "normalized_shape=[32]"),  # norms of all heads together
        (lambda: _model("qwen3_next"), "carry states"),
        (lambda: _model("gpt2"), "has no norm"),
        (_quantised, "projections are Linear, Quantised"),
    ],
    ids=["window", "far places", "no rotation", "other norms", "whole norms", "states", "gpt2", "quantised"],
)
def test_other_models_are_decoded_by_their_own_code(model: Any, reason: str, caplog: Any) -> None:
    hf = model()
    with caplog.at_level(logging.INFO, "rl_dtensor"):
        assert decoding_pass(hf, row_layers(hf.config), "the model") is None
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("rl_dtensor.generation")]
    assert said.startswith("the model is decoded by its code in transformers")
    assert reason in said


def test_attention_that_was_asked_to_be_eager_stays_so() -> None:
    model = _model("qwen3")
    model.set_attn_implementation("eager")
    assert decoding_pass(model, row_layers(model.config), "the model") is None


def _send(decoder: HFDecoder, weights: dict[str, Tensor]) -> None:
    specs = tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in weights.items())
    adoption = decoder.adoption(Manifest(1, specs, {}))
    for name, tensor in weights.items():
        adoption.take(name, tensor)
    adoption.verify()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_weights_that_arrive_are_those_of_the_next_pass(family: str) -> None:
    decoder = _decoder(_model(family, tie_word_embeddings=False), own=True)
    first = _decoded(decoder)
    other = _model(family, seed=1, tie_word_embeddings=False)
    expected = _decoded(_decoder(other, own=False))
    _send(decoder, _file_tensors(other))
    found = _decoded(decoder)
    assert [tokens for tokens, _ in first] != [tokens for tokens, _ in expected]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    # A parameter that the module exchanges is shared again before weights arrive.
    projection = decoder.module.model.layers[0].self_attn.k_proj
    projection.weight = nn.Parameter(projection.weight.detach() + 1, requires_grad=False)
    _send(decoder, _file_tensors(other))
    assert [tokens for tokens, _ in _decoded(decoder)] == [tokens for tokens, _ in expected]


def _file_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model by their names in its files."""
    names = FileNames(model)
    return {
        piece.name: (tensor[piece.region] if piece.region else tensor).clone()
        for name, tensor in model.state_dict().items()
        for piece in names.pieces(name, tuple(tensor.shape))
    }


def test_pages_hold_the_tokens_of_every_row_whatever_joins_and_leaves() -> None:
    draws = np.random.default_rng(0)
    torch.manual_seed(0)
    rows: list[Tensor] = []  # Keys of each row, `[tokens, 2]`.

    def read(tokens: list[int]) -> tuple[RowLayer, list[Tensor]]:
        layer, columns = RowLayer(), max(tokens)
        keys = torch.randn(len(tokens), 1, columns, 2)
        layer.update(keys, -keys)
        return layer, [each[0, columns - count :] for each, count in zip(keys, tokens, strict=True)]

    layer, rows = read([3, 9, 5])
    for _ in range(400):
        match draws.integers(4):
            case 0 if len(rows) < 12:
                joining, read_rows = read(draws.integers(1, 90, draws.integers(1, 4)).tolist())
                layer.join(joining)
                rows += read_rows
            case 1 if len(rows) > 1:
                count = int(draws.integers(1, len(rows)))
                leaving = draws.permutation(len(rows))[count:]
                kept = sorted(set(range(len(rows))) - set(leaving.tolist()))
                moving = [row for row in kept if row >= count]
                places = [place if place in kept else moving.pop() for place in range(count)]
                rows = [rows[place] for place in places]
                layer.keep(places, max(len(row) for row in rows))
            case _:
                new = torch.randn(len(rows), 1, 1, 2)
                keys, values = layer.update(new, -new)
                rows = [torch.cat([row, each[0]]) for row, each in zip(rows, new, strict=True)]
                assert keys.shape[:3] == (len(rows), 1, max(map(len, rows)))
                assert torch.equal(values, -keys)
                for row, held in zip(rows, keys, strict=True):
                    assert torch.equal(held[0, -len(row) :], row)
                    assert torch.isfinite(held).all(), "padding is multiplied by 0"
