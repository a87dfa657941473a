"""The vision of a model: the embeddings of a pass with images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.model_config import VisionConfig
from rl_core.torch.vision.columns import AXES, FEATURES, ImageColumns, ProcessedImages
from rl_core.torch.vision.families import VISION_FAMILIES, VisionFamily
from rl_core.torch.vision.parts import features_of
from rl_dtensor.model.layout import RowLayout
from rl_dtensor.parallel.body import body_of


@dataclass(frozen=True)
class Vision:
    """Embedding of the images of rows.

    The tower computes in every pass: FSDP gathers and reduces its parameters, and all ranks take part in that, also
    ranks whose rows have no images. These pass the smallest image, and no token takes anything of it.

    Args:
        family: Family of the model.
        columns: Makes the columns of rows, on the host.
        compute: Compute dtype of the model.
        token_part: Rank and number of ranks that share the tokens between the blocks of layers.
    """

    family: VisionFamily
    columns: ImageColumns
    compute: torch.dtype
    token_part: tuple[int, int] = (0, 1)

    def inputs(self, hf: PreTrainedModel, layout: RowLayout) -> dict[str, Any]:
        """Return arguments of the language model in place of token ids: embeddings `[batch, seq, hidden]`, and further
        arguments of the family."""
        rows = layout.rows
        values, deep = features_of(self.family, hf.base_model, rows, self.compute)
        places, is_token = layout.places.clamp(min=0), layout.places >= 0
        index = torch.full_like(layout.places, -1)
        if FEATURES in rows:
            index = rows[FEATURES][places].where(is_token, -1)
        index = index.view(layout.shape)
        # In some families image tokens have an id that is not in the table.
        embeddings = hf.get_input_embeddings()(layout.input_ids.where(index < 0, 0))
        rank, size = self.token_part
        own = index.chunk(size, 1)[rank]
        is_image, values = own >= 0, values.to(embeddings.dtype)
        inputs: dict[str, Any] = {
            "inputs_embeds": torch.where(is_image[..., None], values[own.clamp(min=0)], embeddings)
        }
        if (per_layer := _per_layer_inputs(hf, layout.input_ids, index)) is not None:
            inputs["per_layer_inputs"] = per_layer
        if deep:
            chosen = own[is_image]
            inputs["visual_pos_masks"] = is_image
            inputs["deepstack_visual_embeds"] = [each[chosen] for each in deep]
        if AXES in rows:
            axes = rows[AXES][places].T.reshape(3, *layout.shape)
            inputs["position_ids"] = axes.where(is_token.view(layout.shape), layout.position_ids)
        return inputs


def vision_of(
    hf: PreTrainedModel, vision: VisionConfig, folder: Path, compute: torch.dtype, *, token_part: tuple[int, int]
) -> Vision | None:
    """Return the embedding of the images of rows; None for a language model.

    Args:
        hf: Model, on `meta`, whose tower leaves out from then on a head that no feature depends on. The weights of
            that head are kept for the files.
        vision: Settings of images.
        folder: Folder of the model, with the files of its image processor.
        compute: Compute dtype of the model.
        token_part: Rank and number of ranks that share the tokens between blocks.
    """
    if not vision.enabled:
        return None
    family = VISION_FAMILIES[hf.config.model_type]
    for parent, _, name in (each.rpartition(".") for each in family.unused):
        if name == "head":
            vars(hf.get_submodule(parent))["use_head"] = False
    images = ProcessedImages(folder, family, hf.config, vision, compute)
    columns = ImageColumns(family, hf.base_model, images, max_images=vision.max_images)
    return Vision(family, columns, compute, token_part)


def _per_layer_inputs(hf: PreTrainedModel, input_ids: Tensor, index: Tensor) -> Tensor | None:
    """Return the embeddings of tokens that each layer adds (Gemma 4), those of padding for images; None without any."""
    text = hf.config.get_text_config()
    if not getattr(text, "hidden_size_per_layer_input", 0):
        return None
    found: Tensor = body_of(hf).get_per_layer_inputs(input_ids.where(index < 0, text.pad_token_id), None)
    return found
