"""Columns by which a pass sees the images of its rows, made on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_core.data.batch import TOKENS, Batch
from rl_core.images import IMAGES, ImageError
from rl_dtensor.model.layout import IMAGE_BLOCKS
from rl_dtensor.model.vision.families import GRID, Arrays, VisionFamily
from rl_dtensor.model.vision.pixels import ProcessedImages

FEATURES = "image_features"
"""Int64 `[tokens]`: the feature, counted over the microbatch, that takes the place of a token; -1 for text."""

AXES = "rope_axes"
"""Int64 `[tokens, 3]`: the places of each token in time, height and width, counted from the start of its row."""

PREFIX = "images."
"""Begins the names of the columns of pixels, whose lengths are those of images."""


class ImageColumns:
    """Makes the columns of a microbatch: pixels, and for each token its feature and places.

    Args:
        family: Family of the model.
        model: The model without its head, of which only the config and the rule for places are used.
        images: Processed images by digest.
        max_images: Maximum number of images in a row.
    """

    def __init__(self, family: VisionFamily, model: Any, images: ProcessedImages, *, max_images: int) -> None:
        self._family = family
        self._model = model
        self._images = images
        self._max_images = max_images
        self._token: int = model.config.image_token_id

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the columns of rows; none if no row has images.

        Raises:
            ValueError: Naming a row whose images cannot be read, or do not have the tokens that it has for them.
        """
        rows = list(batch.ragged(TOKENS))
        digests: Sequence[Sequence[str]] = [()] * len(rows)
        if IMAGES in batch:
            digests = [[bytes(each).hex() for each in row] for row in batch.ragged(IMAGES)]
        shown = [self._shown(row, tokens, of) for row, (tokens, of) in enumerate(zip(rows, digests, strict=True))]
        images = [image for several in shown for image in several]
        if not images:
            return {}
        tokens = np.concatenate(rows)
        is_image = tokens == self._token
        columns = {PREFIX + name: np.concatenate([each[name] for each in images]) for name in self._family.columns}
        columns[FEATURES] = np.where(is_image, np.cumsum(is_image) - 1, -1)
        if self._family.has_axes:
            columns[AXES] = np.concatenate([self._axes(*each) for each in zip(rows, shown, strict=True)])
        if self._family.sees_both_ways:
            columns[IMAGE_BLOCKS] = image_blocks(is_image, batch.ragged(TOKENS).offsets)
        return columns

    def _shown(self, row: int, tokens: np.ndarray, digests: Sequence[str]) -> list[Arrays]:
        """The images of a row, which are those that its tokens stand for."""
        if len(digests) > self._max_images:
            raise ValueError(
                f"row {row} has {len(digests)} images and vision.max_images is {self._max_images}; set it to more"
            )
        images = []
        for digest in digests:
            try:
                images.append(self._images.of(digest))
            except ImageError as error:
                raise ValueError(f"row {row}: {error}") from error
        places = np.flatnonzero(tokens == self._token)
        counts = [self._family.num_tokens(self._model.config, image) for image in images]
        if sum(counts) != len(places):
            raise ValueError(
                f"row {row} has {len(places)} image tokens (id {self._token}), but its {len(images)} images have "
                f"{counts}: {', '.join(digests) or 'no images'}. The tokens of a row must be expanded by the processor "
                "in the model's folder, with the same vision.min_pixels and max_pixels"
            )
        ends = np.cumsum(counts)[:-1].astype(np.int64)
        if np.any(places[ends] == places[ends - 1] + 1):
            raise ValueError(
                f"row {row} has image tokens that do not end where its images do ({counts} tokens); leave a token of "
                "text between two images"
            )
        return images

    def _axes(self, tokens: np.ndarray, images: Sequence[Arrays]) -> np.ndarray:
        """Int64 `[tokens, 3]` of one row."""
        if not images:
            return np.repeat(np.arange(len(tokens))[:, None], 3, 1)
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        grid = torch.from_numpy(np.concatenate([image[GRID] for image in images]))
        axes, _ = self._model.get_rope_index(ids, (ids == self._token).int(), image_grid_thw=grid)
        found: np.ndarray = axes[:, 0].T.numpy()
        return found


def image_blocks(is_image: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return int64 `[tokens]`, the number of the run of image tokens that each belongs to; -1 for text. No run goes on
    in another row.

    Args:
        is_image: Bool `[tokens]`.
        offsets: Where each row starts and ends.
    """
    follows = np.concatenate([[False], is_image[:-1]])
    follows[offsets[:-1]] = False
    return np.where(is_image, np.cumsum(is_image & ~follows) - 1, -1)


def pixels_of(columns: Mapping[str, Any], family: VisionFamily) -> dict[str, Any] | None:
    """Return the columns of pixels by the names of the image processor; None if there are none."""
    if FEATURES not in columns:
        return None
    return {name: columns[PREFIX + name] for name in family.columns}
