"""The vision of a model that is being built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rl_core.config import Problem
from rl_core.model import HEADLESS_ROLES, Role
from rl_core.model_config import VisionConfig
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.vision.columns import ImageColumns
from rl_dtensor.model.vision.families import VISION_FAMILIES, VisionFamily
from rl_dtensor.model.vision.parts import drop_unused, frozen_names, is_in_part, without_adapters
from rl_dtensor.model.vision.pixels import ProcessedImages
from rl_dtensor.model.vision.settings import vision_problems
from rl_dtensor.model.vision.vision import Vision


def build_problems(vision: VisionConfig, backend: DTensorConfig, hf_config: Any, role: Role) -> Iterator[Problem]:
    """Settings that do not go with a vision-language model, or with its role.

    Args:
        vision: Settings of images; without `enabled` nothing is checked.
        backend: Settings of the backend.
        hf_config: Whole Hugging Face config.
        role: Role of the model.
    """
    if vision.enabled and role in HEADLESS_ROLES:
        yield Problem(
            "vision.enabled",
            f"is not supported for a {role}, whose head has one output",
            got=True,
            allowed="false",
        )
    yield from vision_problems(vision, backend, {"model_type": hf_config.model_type})


@dataclass(frozen=True)
class VisionParts:
    """The parts of a model next to its language model; none of a language model.

    Args:
        family: Family of the model; None of a language model.
        vision: How each part trains.
    """

    family: VisionFamily | None
    vision: VisionConfig

    @classmethod
    def of(cls, hf: PreTrainedModel, vision: VisionConfig) -> VisionParts:
        """The parts of a model on `meta`."""
        return cls(VISION_FAMILIES[hf.config.model_type] if vision.enabled else None, vision)

    def frozen(self, hf: PreTrainedModel) -> set[str]:
        """Return the names of the parameters that do not train with the language model."""
        return set() if self.family is None else frozen_names(hf, self.vision, self.family)

    def freeze(self, hf: PreTrainedModel) -> None:
        """Have those parameters not train."""
        frozen = self.frozen(hf)
        for name, parameter in hf.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)

    def has_no_adapter(self, name: str) -> bool:
        """Return whether a layer belongs to a part without adapters, or to one on which no result depends."""
        if self.family is None:
            return False
        is_unused = name.startswith(tuple(f"{each}." for each in self.family.unused))
        return is_unused or is_in_part(name, without_adapters(self.vision, self.family))


def vision_of(
    hf: PreTrainedModel,
    vision: VisionConfig,
    folder: Path,
    compute: torch.dtype,
    *,
    token_part: tuple[int, int],
) -> Vision:
    """Return how a model sees the images of rows.

    Args:
        hf: Model, on `meta`, whose tower leaves out what no feature depends on from then on.
        vision: Settings of images.
        folder: Folder of the model, with the files of its image processor.
        compute: Dtype in which the model computes.
        token_part: Rank and number of ranks that share the tokens between blocks.
    """
    family = VISION_FAMILIES[hf.config.model_type]
    drop_unused(hf, family)
    images = ProcessedImages(folder, family, vision, compute)
    columns = ImageColumns(family, hf.base_model, images, max_images=vision.max_images)
    return Vision(family, columns, compute, token_part)
