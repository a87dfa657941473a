"""Embeddings of tokens for each layer (Gemma 3n), which vLLM's language model alone leaves out."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from vllm.model_executor.models.gemma3n import Gemma3nSelfDecoder


def embed_tokens_for_each_layer() -> None:
    """Have vLLM's language model of Gemma 3n look these embeddings up, if it is not handed them.

    In vLLM (0.32; models/gemma3n_mm.py) the model with images and sound around it does that. Without it, which is how
    a replica serves the weights that it is sent, the embeddings are left out in silence. To be removed once the
    language model looks them up, which a test looks for.
    """
    compute = Gemma3nSelfDecoder.forward

    @wraps(compute)
    def forward(
        self: Gemma3nSelfDecoder,
        input_ids: Tensor | None,
        positions: Tensor,
        inputs_embeds: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if per_layer_inputs is None and input_ids is not None:
            size = self.config.num_hidden_layers, self.config.hidden_size_per_layer_input
            per_layer_inputs = self.get_per_layer_input_embeddings(input_ids).unflatten(-1, size)
        found: tuple[Tensor, Tensor] = compute(self, input_ids, positions, inputs_embeds, per_layer_inputs, **kwargs)
        return found

    Gemma3nSelfDecoder.forward = forward
