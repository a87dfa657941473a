"""Images as a model's image processor gives them, kept by digest."""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.images import ImageStore
from rl_core.model_config import VisionConfig
from rl_dtensor.model.vision.families import Arrays, VisionFamily, as_held, is_floating

CACHE_BYTES = 2**30
"""Maximum number of bytes of processed images that a rank keeps in host memory. The rows of a group show the same
images, and each step reads its rows several times."""


class ProcessedImages:
    """Processed images of a rank, made when they are first asked for.

    Args:
        folder: Folder of the model, which has the files of the image processor.
        family: Family of the model.
        vision: Number of pixels that images are scaled to.
        compute: Dtype in which pixels are kept.
        store: Images by digest; the store of the run if None.
    """

    def __init__(
        self,
        folder: Path,
        family: VisionFamily,
        vision: VisionConfig,
        compute: torch.dtype,
        *,
        store: ImageStore | None = None,
    ) -> None:
        self._folder = folder
        self._family = family
        self._vision = vision
        self._compute = compute
        self._given = store
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
    def _store(self) -> ImageStore:
        return ImageStore.of_run() if self._given is None else self._given

    @cached_property
    def _processor(self) -> Any:
        # imports torchvision, which models without images do not need
        from transformers import AutoImageProcessor

        sizes = {"min_pixels": self._vision.min_pixels, "max_pixels": self._vision.max_pixels}
        given = {name: size for name, size in sizes.items() if size is not None}
        return AutoImageProcessor.from_pretrained(self._folder, trust_remote_code=False, **given)

    def _processed(self, digest: str) -> Arrays:
        output = self._processor(images=[self._store.open(digest)], return_tensors="pt")
        columns: dict[str, np.ndarray] = {}
        for name in self._family.columns:
            values = output[name].numpy()
            values = values[0] if self._family.is_batched else values
            columns[name] = as_held(values, self._compute) if is_floating(name) else values
        return columns


def _bytes_of(image: Arrays) -> int:
    return sum(values.nbytes for values in image.values())
