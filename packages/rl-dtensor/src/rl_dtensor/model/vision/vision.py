"""The embeddings of a pass: those of its tokens, and the features of its images in their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.torch.host_arrays import to_device
from rl_dtensor.model.layout import Layout
from rl_dtensor.model.vision.columns import AXES, FEATURES, ImageColumns, pixels_of
from rl_dtensor.model.vision.families import Features, VisionFamily, as_computed, as_held, is_floating


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

    def inputs(self, hf: PreTrainedModel, layout: Layout) -> dict[str, Any]:
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

    def _features(self, hf: PreTrainedModel, layout: Layout) -> Features:
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
