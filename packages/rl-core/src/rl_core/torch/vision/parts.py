"""The parts of a vision-language model next to its language model: how they train, and what they make of images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rl_core.model_config import PartTraining, VisionConfig
from rl_core.torch.host_arrays import to_device
from rl_core.torch.loss import Rows
from rl_core.torch.vision.columns import COLUMN_PREFIX, FEATURES
from rl_core.torch.vision.families import PIXELS, VISION_FAMILIES, Features, VisionFamily, as_computed, as_held


def features_of(family: VisionFamily, model: Any, rows: Rows, compute: torch.dtype) -> Features:
    """Return the features of all images of rows; those of the smallest image if there are none.

    Args:
        family: Family of the model.
        model: The model without its head.
        rows: Rows with the columns of `ImageColumns`.
        compute: Compute dtype of the model.
    """
    if FEATURES in rows.columns:
        pixels = {name: rows.columns[COLUMN_PREFIX + name] for name in family.columns}
    else:
        blank = dict(family.blank(model.config))
        blank[PIXELS] = as_held(blank[PIXELS], compute)
        pixels = dict(zip(blank, to_device(list(blank.values()), rows.offsets.device), strict=True))
    pixels[PIXELS] = as_computed(pixels[PIXELS], compute)
    return family.features(model, family.arguments(pixels))


@dataclass(frozen=True)
class VisionParts:
    """The parts of a model next to its language model; a language model has none.

    Args:
        family: Family of the model; None for a language model.
        vision: Training of each part.
    """

    family: VisionFamily | None
    vision: VisionConfig

    @classmethod
    def of(cls, kind: str, vision: VisionConfig) -> VisionParts:
        """Return the parts of a model of a type."""
        return cls(VISION_FAMILIES[kind] if vision.enabled else None, vision)

    def frozen(self, names: Iterable[str]) -> set[str]:
        """Return the parameters of tower and projector among these names that do not train with the language model,
        and the parameters that no result depends on."""
        if self.family is None:
            return set()
        frozen, others = self._parts_that("frozen")
        unused = self.family.unused
        return {
            name for name in names if _is_inside(name, frozen, others) or any(_is_in(name, each) for each in unused)
        }

    def has_no_adapter(self, name: str) -> bool:
        """Return whether a layer belongs to a part without adapters, or to a part that no result depends on."""
        if self.family is None:
            return False
        adapted, others = self._parts_that("adapters")
        is_unused = name.startswith(tuple(f"{each}." for each in self.family.unused))
        return is_unused or _is_inside(name, others, adapted)

    def _parts_that(self, choice: PartTraining) -> tuple[list[str], list[str]]:
        """Return the modules, by name, whose parameters train in a way, and the other parts."""
        assert self.family is not None
        chosen: list[str] = []
        others: list[str] = []
        for part, names in ((self.vision.tower, self.family.tower), (self.vision.projector, self.family.projector)):
            (chosen if part == choice else others).extend(names)
        return chosen, others


def _is_inside(name: str, parts: list[str], others: list[str]) -> bool:
    """Return whether a parameter or module belongs to parts. They may be inside one another: the innermost counts."""
    inner, outer = (max((len(each) for each in names if _is_in(name, each)), default=0) for names in (parts, others))
    return inner > outer


def _is_in(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
