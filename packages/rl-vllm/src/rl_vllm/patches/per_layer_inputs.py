"""Embeddings of tokens for each layer (Gemma 3n), which vLLM's language model leaves out without the model around it.

- Fault: the model with images and sound looks these embeddings up and hands them over. A replica serves only the
  language model, with the weights that it is sent; the embeddings are then left out without a message.
- vLLM 0.32.0, `vllm/model_executor/models/gemma3n.py`; the model around it is in `gemma3n_mm.py`.
- Upstream: no upstream issue found on 2026-11-26.
- Delete when
  `tests/patches/test_per_layer_inputs.py::test_vllms_language_model_of_gemma_3n_does_not_embed_tokens_for_each_layer`
  fails.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from vllm.model_executor.models.gemma3n import Gemma3nSelfDecoder


def embed_tokens_for_each_layer() -> None:
    """Make vLLM's language model of Gemma 3n look these embeddings up if it is not given them."""
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
