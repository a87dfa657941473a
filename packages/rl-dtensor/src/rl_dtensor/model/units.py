"""The parts of a model that FSDP gathers and reduces one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from rl_dtensor.model.vision.parts import vision_layers
from rl_dtensor.parallel.body import is_composite
from rl_dtensor.parallel.experts import STACK_DIMS, expert_modules
from rl_dtensor.parallel.fsdp import Units
from rl_dtensor.parallel.stages import Stages


def ends_of(hf: PreTrainedModel) -> tuple[str, str] | None:
    """Names of the embedding and of the final norm of a whole model; None if it is more than these and its layers."""
    try:
        stages = Stages.of(hf, 1)
    except ValueError:
        return None
    return stages.embedding, stages.final_norm


def units_of(
    hf: PreTrainedModel,
    ends: tuple[str, str] | None,
    *,
    layers: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    wide: Sequence[nn.Module],
) -> Units:
    """The units of a model, or of the part of it that a pipeline stage has.

    Embedding and head are units apart from the root, so that a forward pass starts without the head, and the head's
    gradient is reduced while the layers' is computed. If they share a weight they stay in the root.

    Args:
        hf: Model, not yet sharded.
        ends: Names of its embedding and final norm; None if they are unknown, and stay in the root.
        layers: Its repeated layers.
        experts: Its modules of experts that are split over expert-parallel ranks.
        wide: Heads that compute in float32.
    """
    embedding, end = None, []
    if ends is not None:
        uses = Counter(id(parameter) for _, parameter in hf.named_parameters(remove_duplicate=False))
        table, norm = (hf.get_submodule(name) for name in ends)
        head = hf.get_output_embeddings()
        if isinstance(table, nn.Embedding) and _is_apart(table, uses):
            embedding = table
        if isinstance(head, nn.Module) and head not in wide and _is_apart(head, uses):
            end = [module for module in (norm, head) if _is_apart(module, uses)]
    return Units(
        layers,
        {place: found for place, layer in enumerate(layers) if (found := _inside(layer, experts))},
        {
            parameter
            for module in expert_modules(hf)
            for parameter in module.parameters(recurse=False)
            if parameter.dim() == STACK_DIMS
        },
        embedding,
        end,
        wide,
        vision_layers(hf) if is_composite(hf) else (),
    )


def _is_apart(module: nn.Module, uses: Counter[int]) -> bool:
    """Return whether a module has parameters, and shares none of them."""
    own = [uses[id(parameter)] for parameter in module.parameters()]
    return bool(own) and max(own) == 1


def _inside(layer: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    within = {id(module) for module in layer.modules()}
    return [module for module in modules if id(module) in within]
