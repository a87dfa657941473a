"""Embeddings of tokens for each layer, of Gemma 3n without the model with images and sound around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.gemma3n import Gemma3nSelfDecoder

import rl_vllm.engine_worker

NUM_LAYERS, SIZE = 2, 3
TOKENS, PLACES = torch.tensor([4, 7]), torch.arange(2)


def decoder(given: list[Tensor | None]) -> Any:
    """What the decoder's pass reads of itself; notes the embeddings that its layers would be computed from."""

    def inputs_of_layers(hidden_states: Tensor, per_layer_inputs: Tensor | None) -> Tensor:
        given.append(per_layer_inputs)
        return torch.zeros(len(hidden_states), NUM_LAYERS, SIZE)

    return SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=NUM_LAYERS, hidden_size_per_layer_input=SIZE),
        embed_input_ids=lambda ids: torch.zeros(len(ids), 4),
        get_per_layer_input_embeddings=embeddings,
        get_per_layer_inputs=inputs_of_layers,
        altup_embed=lambda hidden_states: hidden_states.unsqueeze(-1),
        decoder_layers=[],
        layer_idx_start=0,
    )


def embeddings(ids: Tensor) -> Tensor:
    return ids[:, None] + torch.arange(NUM_LAYERS * SIZE)


def test_vllms_language_model_of_gemma_3n_does_not_embed_tokens_for_each_layer() -> None:
    """Once this fails, it need not be made to any longer."""
    assert rl_vllm.engine_worker.EngineWorker
    given: list[Tensor | None] = []
    Gemma3nSelfDecoder.forward.__wrapped__(decoder(given), TOKENS, PLACES)
    assert given == [None]


def test_tokens_are_embedded_for_each_layer_unless_their_embeddings_are_given() -> None:
    given: list[Tensor | None] = []
    Gemma3nSelfDecoder.forward(decoder(given), TOKENS, PLACES)
    own = torch.ones(2, NUM_LAYERS, SIZE)
    Gemma3nSelfDecoder.forward(decoder(given), TOKENS, PLACES, None, own)
    first, second = given
    torch.testing.assert_close(first, embeddings(TOKENS).view(2, NUM_LAYERS, SIZE))
    assert second is own
