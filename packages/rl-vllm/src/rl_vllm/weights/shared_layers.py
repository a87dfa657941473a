"""Layers that a drafter has from the model that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


@contextmanager
def without_layers_of(model: nn.Module, drafter: nn.Module) -> Iterator[None]:
    """Context in which a drafter lacks the embedding and the output layer that are a model's. They are filled with the
    model's weights, and loading only the drafter's would leave them empty.

    Args:
        model: Model that may have some of its layers.
        drafter: Drafter, changed in place.
    """
    shared = {id(layer) for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)}
    places = [
        (parent, name, layer)
        for parent in drafter.modules()
        for name, layer in parent.named_children()
        if id(layer) in shared
    ]
    for parent, name, _ in places:
        parent._modules[name] = None
    try:
        yield
    finally:
        for parent, name, layer in places:
            parent._modules[name] = layer
