"""The column of images of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.data.batch import TOKENS, Batch, image_column
from rl_core.images import IMAGES


def seen_columns(batch: Batch) -> Batch:
    """Return a batch with only what passes of a model read of its rows: the tokens, and the images if it has some."""
    return batch.only([name for name in (TOKENS, IMAGES) if name in batch])


def with_image_column(batch: Batch, images: Sequence[Sequence[str]]) -> Batch:
    """Return a batch with the column `rl_core.images.IMAGES`; as it is if no row has an image.

    Args:
        batch: Batch of rows.
        images: Digests of each row's images, in the order of their tokens.
    """
    return batch.with_columns({IMAGES: image_column(images)}) if any(images) else batch
