"""Images of rows, for groups of rollouts that have none next to groups that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.data.batch import Batch, RemoteRows
from rl_core.data.image_column import image_column
from rl_core.images import IMAGES


@dataclass(frozen=True, eq=False)
class NoImages:
    """A `rl_core.data.batch.RowStore` of rows without images, made by the process that reads it.

    Args:
        num_rows: Number of rows.
    """

    num_rows: int

    def fetch(self) -> Batch:
        """Make the column."""
        return Batch({IMAGES: image_column([()] * self.num_rows)})


def with_images(batches: Sequence[Batch]) -> list[Batch]:
    """The same columns, and in all of them `images` if one has it, empty where there were none.

    Args:
        batches: Columns of groups of rollouts, with `tokens`.
    """
    if not any(IMAGES in batch for batch in batches):
        return list(batches)

    def filled(batch: Batch) -> Batch:
        rows = RemoteRows.of(NoImages(len(batch)), batch.lengths)
        return batch.with_columns(rows.columns([IMAGES]))

    return [batch if IMAGES in batch else filled(batch) for batch in batches]
