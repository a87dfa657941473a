"""The column of images of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_core.data.ragged import Ragged
from rl_core.images import DIGEST_BYTES


def image_column(images: Sequence[Sequence[str]]) -> Ragged:
    """Return the column `rl_core.images.IMAGES` of rows.

    Args:
        images: Digests of each row's images, in the order of their tokens.
    """
    rows = [np.frombuffer(bytes.fromhex("".join(digests)), dtype=np.uint8) for digests in images]
    return Ragged.from_rows(rows, np.uint8, (DIGEST_BYTES,))
