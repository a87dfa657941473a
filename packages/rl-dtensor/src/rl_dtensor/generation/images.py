"""Prompts with images, for the model that decodes their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.data.batch import TOKENS, Batch, image_column
from rl_core.data.ragged import Ragged
from rl_core.errors import RequestRefused
from rl_core.images import IMAGES
from rl_core.model_config import VisionConfig
from rl_core.rollouts.generation import GenerationRequest
from rl_core.torch.host_arrays import to_device
from rl_core.torch.vision.columns import AXES, COLUMN_PREFIX, ImageColumns, ProcessedImages
from rl_core.torch.vision.families import PIXELS, VISION_FAMILIES, as_computed

ShownRows = tuple[Mapping[str, Any], Sequence[np.ndarray] | None]
"""Images of whole prompts, for a pass over them.

Further arguments of the model: pixels, and their grids or masks; and int64 `[tokens, 3]` of each row, the places of its
tokens in time, height and width. The latter is None if the family has one place for each token, or no row has images.
"""


class PromptImages:
    """Reads the images of prompts, in the thread that decodes. Processed images are kept for the rows of a group.

    Args:
        hf: Whole vision-language model.
        folder: Folder of the model, with the files of its image processor.
        vision: Settings of images.
    """

    def __init__(self, hf: PreTrainedModel, folder: Path, vision: VisionConfig) -> None:
        self._family = VISION_FAMILIES[hf.config.model_type]
        self._compute = hf.dtype
        self._device = hf.device
        self._token: int = hf.config.image_token_id
        images = ProcessedImages(folder, self._family, hf.config, vision, self._compute)
        self._columns = ImageColumns(self._family, hf.base_model, images, max_images=vision.max_images)

    def check(self, request: GenerationRequest) -> None:
        """Refuse a prompt whose images cannot be read, or do not have the tokens that it has for them.

        Raises:
            RequestRefused: With the reason.
        """
        try:
            self._columns(_batch_of([request]))
        except ValueError as error:
            raise RequestRefused(str(error).removeprefix("row 0: ").replace("row 0", "the request")) from error

    def of(self, requests: Sequence[GenerationRequest], tokens: Tensor) -> ShownRows:
        """Return the images of prompts for a pass.

        Args:
            requests: Prompts that `check` accepts.
            tokens: Int64 `[rows, columns]` on the host, left-padded with a token that is not an image token.
        """
        columns = self._columns(_batch_of(requests))
        if not columns:
            return {}, None
        names = self._family.columns
        held = dict(zip(names, to_device([columns[COLUMN_PREFIX + name] for name in names], self._device), strict=True))
        held[PIXELS] = as_computed(held[PIXELS], self._compute)
        arguments: dict[str, Any] = {**self._family.arguments(held)}
        if self._family.type_ids:
            arguments[self._family.type_ids] = (tokens == self._token).int().to(self._device)
        axes = None
        if AXES in columns:
            ends = np.cumsum([len(request.token_ids) for request in requests])[:-1]
            axes = np.split(columns[AXES], ends)
        return arguments, axes


def _batch_of(requests: Sequence[GenerationRequest]) -> Batch:
    tokens = Ragged.from_rows([request.token_ids for request in requests], np.int32)
    return Batch({TOKENS: tokens, IMAGES: image_column([request.images for request in requests])})
