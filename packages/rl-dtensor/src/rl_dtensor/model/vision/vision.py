"""The embeddings of a pass: those of its tokens, and the features of its images in their places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.config import Problem
from rl_core.model import HEADLESS_ROLES, Role
from rl_core.model_config import PartTraining, VisionConfig
from rl_core.torch.host_arrays import to_device
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.layout import RowLayout
from rl_dtensor.model.settings import vision_problems
from rl_dtensor.model.vision.columns import AXES, FEATURES, ImageColumns, ProcessedImages, pixels_of
from rl_dtensor.model.vision.families import VISION_FAMILIES, Features, VisionFamily, as_computed, as_held, is_floating


@dataclass(frozen=True)
class Vision:
    """How a model sees the images of rows.

    The tower computes in every pass: FSDP gathers and reduces its parameters, in which all ranks take part, also those
    whose rows have no images. They pass the smallest image, of which no token takes anything.

    Args:
        family: Family of the model.
        columns: Makes the columns of rows, on the host.
        compute: Dtype in which the model computes.
        token_part: Rank and number of ranks that share the tokens between the blocks of layers.
    """

    family: VisionFamily
    columns: ImageColumns
    compute: torch.dtype
    token_part: tuple[int, int] = (0, 1)

    def inputs(self, hf: PreTrainedModel, layout: RowLayout) -> dict[str, Any]:
        """Return arguments of the language model in place of token ids: embeddings `[batch, seq, hidden]`, and what the
        family hands on next to them."""
        found = self._features(hf, layout)
        places, is_token = layout.places.clamp(min=0), layout.places >= 0
        rows = layout.rows
        index = torch.full_like(layout.places, -1)
        if FEATURES in rows:
            index = rows[FEATURES][places].where(is_token, -1)
        index = index.view(layout.shape)
        # an id that is not in the table stands for images in some families
        embeddings = hf.get_input_embeddings()(layout.input_ids.where(index < 0, 0))
        rank, size = self.token_part
        own = index.chunk(size, 1)[rank]
        is_image, values = own >= 0, found.values.to(embeddings.dtype)
        inputs: dict[str, Any] = {
            "inputs_embeds": torch.where(is_image[..., None], values[own.clamp(min=0)], embeddings)
        }
        if found.deep:
            chosen = own[is_image]
            inputs["visual_pos_masks"] = is_image
            inputs["deepstack_visual_embeds"] = [each[chosen] for each in found.deep]
        if AXES in rows:
            axes = rows[AXES][places].T.reshape(3, *layout.shape)
            inputs["position_ids"] = axes.where(is_token.view(layout.shape), layout.position_ids)
        return inputs

    def _features(self, hf: PreTrainedModel, layout: RowLayout) -> Features:
        pixels = pixels_of(layout.rows.columns, self.family)
        if pixels is None:
            pixels = self._blank(hf, layout.input_ids.device)
        columns = {
            name: as_computed(values, self.compute) if is_floating(name) else values for name, values in pixels.items()
        }
        return self.family.features(hf.base_model, columns)

    def _blank(self, hf: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
        blank = self.family.blank(hf.config)
        held = {name: as_held(each, self.compute) if is_floating(name) else each for name, each in blank.items()}
        return dict(zip(held, to_device(list(held.values()), device), strict=True))


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


def parts_that(vision: VisionConfig, family: VisionFamily, choice: PartTraining) -> tuple[tuple[str, ...], tuple[str, ...]]:
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


def _is_in(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
