"""Which parts of a vision-language model train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_core.model_config import Part, VisionConfig
from rl_dtensor.model.vision.families import VisionFamily
from rl_dtensor.parallel.body import body_of


def parts_that(vision: VisionConfig, family: VisionFamily, choice: Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the modules whose parameters train in a way, and of those inside them that do not."""
    chosen: list[str] = []
    others: list[str] = []
    for part, names in ((vision.tower, family.tower), (vision.projector, family.projector)):
        (chosen if part == choice else others).extend(names)
    return tuple(chosen), tuple(others)


def is_in_part(name: str, parts: tuple[tuple[str, ...], tuple[str, ...]]) -> bool:
    """Return whether a parameter or module belongs to parts, which may lie inside one another: the innermost counts."""
    inside, outside = (max((len(each) for each in names if _is_in(name, each)), default=0) for names in parts)
    return inside > outside


def frozen_names(hf: PreTrainedModel, vision: VisionConfig, family: VisionFamily) -> set[str]:
    """Return the names of the parameters of tower and projector that do not train, where the language model does, and
    of those that no result depends on."""
    frozen = parts_that(vision, family, "frozen")
    return {
        name
        for name, _ in hf.named_parameters()
        if is_in_part(name, frozen) or any(_is_in(name, unused) for unused in family.unused)
    }


def without_adapters(vision: VisionConfig, family: VisionFamily) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parts whose layers get no adapters, and those inside them that do."""
    adapted, others = parts_that(vision, family, "adapters")
    return others, adapted


def drop_unused(hf: PreTrainedModel, family: VisionFamily) -> None:
    """Have the tower leave out a head of its own on which no feature depends. Its weights are kept for the files."""
    for name in family.unused:
        owner = hf.get_submodule(name.rpartition(".")[0])
        vars(owner)["use_head"] = False


def vision_layers(hf: PreTrainedModel) -> Sequence[nn.Module]:
    """Return the repeated layers of the vision tower."""
    return list(_outermost_layers(hf, body_of(hf)))


def _outermost_layers(module: nn.Module, language: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if child is language:
            continue
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _outermost_layers(child, language)


def _is_in(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
