"""The shape of a whole model, from which a step's operations follow."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from megatron.core.transformer import TransformerConfig

from rl_core.torch.training.flops import ModelShape, attention_shapes
from rl_megatron.conversion.weight_map import WeightMap
from rl_megatron.model.model import EMBEDDING, ReadingModel
from rl_megatron.training.weights import SCORE, Weights


def shape_of(model: ReadingModel, weights: Weights, *, trains_routers: bool) -> ModelShape:
    """The shape of a model with its adapters, whatever part of it this rank holds."""
    # the embedding is looked up; a head that is tied to it multiplies with a copy
    multiplied = [entry for entry in weights.maps if entry.copy_of or entry.sources[0].name != EMBEDDING]
    adapters = {half.target for adapter in model.adapters.values() for half in (adapter.down, adapter.up)}
    if adapters:
        trained = [entry for entry in multiplied if entry.target in adapters or entry.target == SCORE]
    else:
        trained = [entry for entry in multiplied if trains_routers or ".router." not in entry.target]
    return ModelShape(
        _entries_for_one_token(multiplied, model.config),
        _entries_for_one_token(trained, model.config),
        attention_shapes(model.hf),
    )


def _entries_for_one_token(maps: Sequence[WeightMap], config: TransformerConfig) -> int:
    """Entries of all matrices but those of experts that a token is not sent to."""
    sizes = [(entry, prod(source.shape)) for entry in maps for source in entry.sources if len(source.shape) > 1]
    dense = sum(size for entry, size in sizes if entry.over == "tp")
    experts = sum(size for entry, size in sizes if entry.over == "etp")
    # all experts of a model have one shape
    return dense + (experts * config.moe_router_topk // config.num_moe_experts if experts else 0)
