"""Columns for a pass over rows with images, made on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.data.batch import TOKENS, Batch
from rl_core.images import IMAGES, ImageError, ImageStore
from rl_core.model_config import VisionConfig
from rl_core.torch.vision.families import GRID, PIXELS, Arrays, VisionFamily, as_held

FEATURES = "image_features"
"""Int64 `[tokens]`: the feature, counted over the microbatch, that takes the place of a token; -1 for text."""

AXES = "rope_axes"
"""Int64 `[tokens, 3]`: the places of each token in time, height and width, counted from the start of its row."""

COLUMN_PREFIX = "images."
"""Prefix of the columns of pixels, which have an entry for each image."""
CACHE_BYTES = 2**30
"""Maximum number of bytes of processed images that a rank keeps in host memory. The rows of a group show the same
images, and each step reads its rows several times."""


class ImageColumns:
    """Makes the columns of a microbatch: pixels, and for each token its feature and places.

    Args:
        family: Family of the model.
        model: The model without its head. Only its config and its rule for places are used.
        images: Processed images by digest.
        max_images: Maximum number of images in a row.
    """

    def __init__(self, family: VisionFamily, model: Any, images: ProcessedImages, *, max_images: int) -> None:
        self._family, self._model, self._images = family, model, images
        self._max_images = max_images
        self._token: int = model.config.image_token_id

    def __call__(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return the columns of rows; none if no row has images.

        Raises:
            ValueError: Naming a row whose images cannot be read, or do not have the tokens that it has for them.
        """

        def axes_of(tokens: np.ndarray, images: Sequence[Arrays]) -> np.ndarray:
            if not images:
                return np.repeat(np.arange(len(tokens))[:, None], 3, 1)
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            grid = torch.from_numpy(np.concatenate([image[GRID] for image in images]))
            axes, _ = self._model.get_rope_index(ids, (ids == self._token).int(), image_grid_thw=grid)
            return axes[:, 0].T.numpy()

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
        columns = {
            COLUMN_PREFIX + name: np.concatenate([each[name] for each in images]) for name in self._family.columns
        }
        columns[FEATURES] = np.where(is_image, np.cumsum(is_image) - 1, -1)
        if self._family.has_axes:
            columns[AXES] = np.concatenate([axes_of(*each) for each in zip(rows, shown, strict=True)])
        if blocks := self._family.blocks(self._model.config):
            columns[blocks] = image_blocks(is_image, batch.ragged(TOKENS).offsets)
        return columns

    def _shown(self, row: int, tokens: np.ndarray, digests: Sequence[str]) -> list[Arrays]:
        """Return the images of a row, after a check that its image tokens fit them."""
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


def image_blocks(is_image: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return int64 `[tokens]`, the number of the run of image tokens that each belongs to; -1 for text. Each run is in
    one row.

    Args:
        is_image: Bool `[tokens]`.
        offsets: Where each row starts and ends.
    """
    follows = np.concatenate([[False], is_image[:-1]])
    follows[offsets[:-1]] = False
    return np.where(is_image, np.cumsum(is_image & ~follows) - 1, -1)


class ProcessedImages:
    """Processed images of a rank, made when they are first asked for.

    Args:
        folder: Folder of the model, which has the files of the image processor.
        family: Family of the model.
        config: Hugging Face config of the whole model.
        vision: Number of pixels that images are scaled to.
        compute: Dtype of the pixels.
    """

    def __init__(
        self, folder: Path, family: VisionFamily, config: Any, vision: VisionConfig, compute: torch.dtype
    ) -> None:
        self._folder, self._family, self._vision = folder, family, vision
        self._processing = family.processing(config)
        self._compute = compute
        self._store: ImageStore | None = None
        self._kept: OrderedDict[str, Arrays] = OrderedDict()
        self._num_bytes = 0

    def of(self, digest: str) -> Arrays:
        """Return the columns of one image.

        Raises:
            ImageError: If the image is not in the store, or cannot be read.
        """
        found = self._kept.pop(digest, None)
        if found is None:
            found = self._processed(digest)
            self._num_bytes += _bytes_of(found)
        self._kept[digest] = found
        while self._num_bytes > CACHE_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _bytes_of(oldest)
        return found

    @cached_property
    def _processor(self) -> Any:
        # The processor imports torchvision, which models without images do not need.
        from transformers import AutoImageProcessor

        sizes = {"min_pixels": self._vision.min_pixels, "max_pixels": self._vision.max_pixels}
        given = {name: size for name, size in sizes.items() if size is not None}
        return AutoImageProcessor.from_pretrained(self._folder, trust_remote_code=False, **given)

    def _processed(self, digest: str) -> Arrays:
        if self._store is None:
            self._store = ImageStore.of_run()
        output = self._processor(images=[self._store.open(digest)], return_tensors="pt", **self._processing)
        results = {name: torch.as_tensor(output[name]) for name in self._family.columns}
        # Llama 4's image processor computes in bfloat16, which numpy lacks.
        results[PIXELS] = results[PIXELS].float()
        columns = self._family.held({name: values.numpy() for name, values in results.items()})
        return {**columns, PIXELS: as_held(columns[PIXELS], self._compute)}


def _bytes_of(image: Arrays) -> int:
    return sum(values.nbytes for values in image.values())
